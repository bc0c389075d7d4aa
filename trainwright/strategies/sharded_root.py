"""The sharded root: what stands around a module under fsdp as FSDP's root, and what a call of the module itself gathers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainwright.strategies.base import StepForward
from trainwright.strategies.shard_write_back import record_versions, write_back

ROOT = "_fsdp_root"
"""Where a sharded module keeps the wrapper that is FSDP's root, for the next run with it."""


class Root(StepForward):
    """FSDP's root: its forward is a step of the module, whose own class and attributes so stay as they are."""

    dtype: torch.dtype | None = None
    """What parameters are gathered in; None for their own."""
    depth = 0
    """Greater than 0 while a step runs."""
    is_called_alone = False
    """Whether the module is being called outside of a step."""

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
    """Gather the root's own parameters for a call of the module outside of a step, as after a fit. Collective."""
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
    """Let go of what was gathered for a call outside of a step, with what it has written."""
    root = module.__dict__.get(ROOT)
    if root is not None and root.is_called_alone:
        root.depth, root.is_called_alone = 0, False
        write_back(root)
        root.reshard()


def refuse_copy(module: nn.Module, memo: Any) -> None:
    """Refuse a deep copy of a module that is sharded, or that holds one (RuntimeError)."""
    raise RuntimeError(
        "a module that fsdp has sharded cannot be copied: each rank holds a part of it. tw.gather_module(module), called on "
        "all ranks, gives a whole, plain copy in host memory."
    )
