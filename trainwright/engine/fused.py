"""Fused: optimizers whose step is one kernel, if torch has one and the user chose no implementation."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adagrad, Adam, Optimizer

from trainwright.devices.abilities import fuses

CLASSES = (Adam, SGD, Adagrad)  # AdamW is an Adam
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_watched: WeakSet[Optimizer] = WeakSet()
"""The optimizers whose steps begin with `_add_momentum`."""


def use_fused(optimizer: Optimizer, modules: Iterable[nn.Module] = ()) -> bool:
    """Fuse the groups whose `fused` and `foreach` are None, where possible. Return whether any group is fused.

    Call it again for groups that were added since. `modules` contain the parameters that the optimizer steps. Their embeddings
    may have sparse gradients, which no fused kernel takes.
    """
    kind = next((kind for kind in CLASSES if _steps_as(optimizer, kind)), None)
    if kind is None:
        return False
    layers = [layer for module in modules for layer in module.modules() if getattr(layer, "sparse", False) is True]
    sparse = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    for group in optimizer.param_groups:
        if group.get("fused", False) is None and any(map(is_lazy, group["params"])):
            # For good: a later call, once the layers have run, would fuse it, but in a resumed run at another step.
            group["fused"] = False
        if _can_be_fused(group, kind, sparse):
            group["fused"] = True
            for parameter in group["params"]:
                # The kernel needs the count of steps on the parameter's device. An unfused step has it in host memory.
                if "step" in (state := optimizer.state.get(parameter, {})):
                    state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    has_momentum = kind is SGD and any(group["momentum"] for group in optimizer.param_groups)
    if is_fused and has_momentum and optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_step_pre_hook(_add_momentum)
    return is_fused


def _steps_as(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Return whether an optimizer is of a class, or of a subclass that does not change the step."""
    # Compares the inner functions, because torch wraps the method when it makes the first instance of a class.
    return isinstance(optimizer, kind) and inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


def _can_be_fused(group: dict[str, Any], kind: type[Optimizer], sparse: set[int]) -> bool:
    if group.get("fused", False) is not None or group.get("foreach", False) is not None:
        return False
    if group.get("capturable") or group.get("differentiable") or group.get("dampening"):  # see _add_momentum
        return False
    if any(isinstance(value, Tensor) for value in (group["lr"], *group.get("betas", ()))):
        return False  # a kernel would round a tensor of float64
    return all(_is_fit(parameter, kind) and id(parameter) not in sparse for parameter in group["params"])


def _is_fit(parameter: Tensor, kind: type[Optimizer]) -> bool:
    if type(parameter) not in (Tensor, nn.Parameter) or parameter.is_meta:
        return False
    # Fused kernels ignore strides. empty_like keeps the strides only if the tensor's elements are adjacent in memory.
    if parameter.dtype not in DTYPES or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return False
    # On the CPU torch 2.13's fused SGD does not update most elements of a half-precision tensor.
    if kind is SGD and parameter.device.type == "cpu" and parameter.dtype in (torch.bfloat16, torch.float16):
        return False
    return fuses(parameter.device.type, kind.__name__, parameter.dtype)


def _add_momentum(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give a momentum buffer of zeros to parameters that lack one before a fused step of SGD.

    Its kernel takes all momentum buffers or none, but a parameter may get its first gradient late, when it is unfrozen.
    """
    groups, state = optimizer.param_groups, optimizer.state
    if len(state) >= sum(len(group["params"]) for group in groups):  # the usual step
        return
    for group in groups:
        if group["fused"] and group["momentum"] and any(state.get(parameter) for parameter in group["params"]):
            for parameter in group["params"]:
                if parameter.requires_grad and not state.get(parameter):
                    state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
