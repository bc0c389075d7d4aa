"""The sharded root: FSDP's root module around the user's, and gathering for calls of the module itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainwright.strategies.base import StepForward
from trainwright.strategies.shard_write_back import record_versions, write_back

ROOT = "_fsdp_root"
"""The attribute of a sharded module that keeps FSDP's root for its next run."""


class Root(StepForward):
    """FSDP's root: its forward runs a step of the module, which keeps its class and attributes."""

    dtype: torch.dtype | None = None
    """The dtype that parameters are gathered in; None for their own."""
    depth = 0
    """Positive while a step runs."""
    is_called_alone = False
    """Whether the module is called outside a step."""

    def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        self.depth += 1
        record_versions(self)
        try:
            output = super().forward(name, *args, **kwargs)
            write_back(self)
            return output
        finally:
            self.depth -= 1


def unshard_for_call(module: nn.Module, args: Any) -> None:
    """Gather the root's own parameters for a call outside a step, such as after a fit. Collective."""
    root = module.__dict__.get(ROOT)
    if root is None or root.depth > 0:
        return
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{type(module).__name__} is sharded by fsdp, and was called outside of a step with gradients, which would not be "
            "reduced; call it under torch.no_grad(), on every rank, train it by a Trainer or an Accelerator, or take the whole "
            "copy that tw.gather_module(module) gives."
        )
    root.depth, root.is_called_alone = 1, True
    root.unshard()
    record_versions(root)


def reshard_after_call(module: nn.Module, args: Any, output: Any) -> None:
    """Reshard after a call outside a step, and write back what it wrote."""
    root = module.__dict__.get(ROOT)
    if root is not None and root.is_called_alone:
        root.depth, root.is_called_alone = 0, False
        write_back(root)
        root.reshard()


def refuse_copy(module: nn.Module, memo: Any) -> None:
    """Raise RuntimeError for a deep copy of a sharded module, or of one that holds a sharded one."""
    raise RuntimeError(
        "a module that fsdp has sharded cannot be copied: each rank holds a part of it. tw.gather_module(module), called on "
        "all ranks, gives a whole, plain copy in host memory."
    )
