"""Private parts of torch's gradient scaler and of modules, read against torch 2.11 to 2.13."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def scale_of(scaler: torch.amp.GradScaler) -> Tensor:
    """Return the scale on its device. The public method would wait for the device."""
    assert scaler._scale is not None
    return scaler._scale


def set_scale(scaler: torch.amp.GradScaler, scale: Tensor) -> None:
    scaler._scale = scale


def take_infs(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> dict[torch.device, Tensor]:
    """Remove and return the infs found by `unscale_`, which rejects a second call before the next update."""
    infs: dict[torch.device, Tensor] = scaler._per_optimizer_states.pop(id(optimizer))["found_inf_per_device"]
    return infs


def record_infs(scaler: torch.amp.GradScaler, number: int, infs: dict[torch.device, Tensor]) -> None:
    """Store infs for the next update, which fails without any."""
    scaler._per_optimizer_states[number]["found_inf_per_device"] = infs


def forget_infs(scaler: torch.amp.GradScaler) -> None:
    scaler._per_optimizer_states.clear()


def converts_children(module: nn.Module) -> bool:
    """Return whether a module's own `_apply` always converts its children too."""
    return "recurse" not in inspect.signature(module._apply).parameters


def converts_as_torch_does(module: nn.Module) -> bool:
    """Return whether a module's class only converts its parameters and buffers. Torch's RNNs flatten their weights again."""
    return type(module)._apply is nn.Module._apply or isinstance(module, nn.RNNBase)


def convert(module: nn.Module, function: Callable[[Tensor], Tensor], *, recurse: bool) -> None:
    """Convert the tensors of a module in place, and those of its children if `recurse`."""
    module._apply(function, **({} if recurse else {"recurse": False}))  # type: ignore[no-untyped-call]
