"""Fused: optimizers whose step is one kernel, where torch has one and the user asked for no other way."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adagrad, Adam, Optimizer

from trainwright.devices.abilities import fuses

CLASSES = (Adam, SGD, Adagrad)  # AdamW is an Adam
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def use_fused(optimizer: Optimizer, modules: Iterable[nn.Module] = ()) -> bool:
    """Let the groups whose `fused` and `foreach` were left alone run fused, where they can; return whether any does.

    It may be called again, for groups that were added since. `modules` are those that the optimizer steps: in them stand
    the embeddings whose gradients are sparse, which no fused kernel takes.
    """
    kind = next((each for each in CLASSES if _steps_as(optimizer, each)), None)
    if kind is None:
        return False
    sparse = {
        id(parameter)
        for module in modules
        for child in module.modules()
        if getattr(child, "sparse", False) is True
        for parameter in child.parameters(recurse=False)
    }
    for group in optimizer.param_groups:
        if any(is_lazy(parameter) for parameter in group["params"]) and group.get("fused", False) is None:
            # For good: once its layers have run a later call would fuse it, in a resumed run at another step.
            group["fused"] = False
        if _can_be_fused(group, kind, sparse):
            group["fused"] = True
            for parameter in group["params"]:
                _move_step(parameter, optimizer.state.get(parameter, {}))
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    hooks = optimizer._optimizer_step_pre_hooks.values()
    if is_fused and kind is not Adam and not any(isinstance(hook, _Watch) for hook in hooks):
        optimizer.register_step_pre_hook(_Watch())
    return is_fused


def _steps_as(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Return whether an optimizer is of a class, or of a subclass that steps as this one does."""
    # torch wraps these of each class when its first instance is made, and when its compiler is loaded, so the functions
    # inside are compared.
    return isinstance(optimizer, kind) and all(
        inspect.unwrap(getattr(type(optimizer), name)) is inspect.unwrap(getattr(kind, name))
        for name in ("step", "_init_group")
    )


def _can_be_fused(group: dict[str, Any], kind: type[Optimizer], sparse: set[int]) -> bool:
    if group.get("fused", False) is not None or group.get("foreach", False) is not None:
        return False
    if group.get("capturable") or group.get("differentiable"):
        return False
    if any(isinstance(value, Tensor) for value in (group["lr"], *group.get("betas", ()))):
        return False  # a kernel would round a tensor of float64
    if group.get("dampening"):
        return False  # see _Watch
    return all(_is_fit(parameter, kind) and id(parameter) not in sparse for parameter in group["params"])


def _is_fit(parameter: Tensor, kind: type[Optimizer]) -> bool:
    if type(parameter) not in (Tensor, nn.Parameter) or parameter.is_meta:
        return False
    if parameter.dtype not in DTYPES or not _is_dense(parameter):
        return False
    # On the CPU torch 2.13's fused SGD leaves most elements of a half-precision tensor as they were.
    if kind is SGD and parameter.device.type == "cpu" and parameter.dtype in (torch.bfloat16, torch.float16):
        return False
    return fuses(parameter.device.type, kind.__name__, parameter.dtype)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements lie side by side in memory: fused kernels walk over it, whatever its strides."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _move_step(parameter: Tensor, state: dict[str, Any]) -> None:
    """Give the count of steps that a state already has the place and the dtype that a fused kernel wants."""
    if "step" in state:
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)


class _Watch:
    """Called before each fused step of SGD and Adagrad, for what their unfused steps can do and the kernels cannot.

    SGD's kernel takes all momentum buffers or none, but a parameter may get its first gradient late (unfrozen, say): it is
    given zeros then, which is what it would start from without dampening. A gradient that turns out to be sparse in the
    first step unfuses its group.
    """

    def __init__(self) -> None:
        self._is_first = True

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_first:
            self._is_first = False
            for group in optimizer.param_groups:
                if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in group["params"]):
                    group["fused"] = False
        state = optimizer.state
        for group in optimizer.param_groups:
            if (
                group["fused"]
                and group.get("momentum")
                and len(state) < sum(len(each["params"]) for each in optimizer.param_groups)
            ):
                late = [
                    parameter for parameter in group["params"] if parameter.requires_grad and not state.get(parameter)
                ]
                if any(state.get(parameter) for parameter in group["params"]):
                    for parameter in late:
                        state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
