"""The private names of torch that fsdp needs, as read in torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.batchnorm import _BatchNorm

BATCH_NORM = _BatchNorm


def first_row(shard: DTensor) -> int:
    """Return the number of the first row of a parameter that this rank holds."""
    _, offsets = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    return offsets[0]


def flatten(mesh: DeviceMesh) -> None:
    """Let DTensor sum over all dimensions of a mesh in one collective, as for the norm of the gradients. Collective."""
    mesh._flatten()


def without_view(tensor: Tensor) -> Tensor:
    """Return a tensor that is no view of another."""
    return tensor.clone() if tensor._is_view() else tensor


def gather_for_backward(root: Any, loss: Tensor) -> None:
    """Let the backward of a loss that was computed within the root's forward gather and reduce the root's group."""
    root._get_fsdp_state()._register_pre_backward_hook(loss)


def follow_unfrozen(root: nn.Module) -> None:
    """Set the dtypes of gradients again, which FSDP leaves unset for groups that are frozen in their first forward."""
    for module in root.modules():
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None:
            group._init_mp_dtypes()


def refuse_hooks(module: nn.Module) -> None:
    """Raise ValueError for hooks on parameters' gradients, because sharding replaces the parameters."""
    for name, parameter in module.named_parameters():
        hooks: Any = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        if any(hooks) and not isinstance(parameter, DTensor):
            raise ValueError(
                f"{name!r} of {type(module).__name__} has a hook on its gradient, and fsdp replaces the parameter, so the hook "
                "would not be called. Change gradients in on_before_optimizer_step, or call "
                "parameter.register_post_accumulate_grad_hook in on_fit_start, where the parameters are sharded."
            )


class WriteCheck:
    """Rejects writes into a group's gathered parameters, which FSDP2 frees without a look at them."""

    def __init__(self, group: nn.Module, own: Collection[Tensor]) -> None:
        self._slots = [
            (f"{path}.{name}".removeprefix(".").removeprefix("module."), module._parameters, name)
            for path, module in group.named_modules()
            for name, parameter in module._parameters.items()
            if parameter in own
        ]
        self._before: list[tuple[int, int] | None] = []

    def record(self, *_: Any) -> None:
        """Record the state just after the gathering, as a forward pre-hook that runs after FSDP's."""
        if not torch.compiler.is_compiling():
            self._before = [_written(table[name]) for _, table, name in self._slots]

    def check(self, *_: Any) -> None:
        """Raise RuntimeError if a gathered parameter was written, as a forward hook that runs before FSDP's."""
        for (name, table, key), before in zip(self._slots, self._before, strict=False):
            if before is not None and _written(table[key]) not in (None, before) and not torch.compiler.is_compiling():
                raise RuntimeError(
                    f"the step wrote the parameter {name!r} while fsdp had gathered it, and a rank only keeps a shard. Write "
                    "it in a hook such as on_train_batch_end, where it is the shard, make it a buffer, or choose 'ddp' or "
                    "'ddp_sharded'."
                )


def _written(parameter: Any) -> tuple[int, int] | None:
    """Return values that change if a gathered parameter is written, or None for a shard."""
    if isinstance(parameter, DTensor):
        return None
    return 0 if parameter.is_inference() else parameter._version, parameter.data_ptr()
