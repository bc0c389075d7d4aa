"""Models outside of `prepare`: made without values on the meta device, or taken out of their wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from trainwright.engine.prepared import PreparedModule
from trainwright.strategies.base import StepForward
from trainwright.tensor_names import WRAPPER, is_compiled


@contextmanager
def init_empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """Put the parameters of modules made in the block on the meta device, where they take no memory and have no values.

    `accelerator.prepare` gives them the values that a plain start would have. A checkpoint can be loaded, or
    memory planned (`tw.estimate_memory`), without them.

    Args:
        include_buffers: put buffers there too. Then nothing is allocated at all.

    >>> with tw.init_empty_weights():
    ...     model = nn.Linear(4, 3)
    >>> model.weight.device
    device(type='meta')
    >>> model = tw.Accelerator(cpu=True).prepare(model)  # now it has values
    >>> model.weight.device
    device(type='cpu')
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool = False) -> Iterator[None]:
    """Put the parameters of modules made in the block on a device.

    Args:
        device: a torch.device, or the argument of one, such as "cuda:1".
        include_buffers: make all tensors of the block there, buffers too.

    >>> with tw.init_on_device("meta", include_buffers=True):
    ...     layer = nn.BatchNorm1d(8)
    >>> layer.weight.is_meta, layer.running_mean.is_meta
    (True, True)
    """
    device = torch.device(device)

    def moved_parameter(module: nn.Module, name: str, given: nn.Parameter) -> Tensor | None:
        is_there = given.device.type == device.type and device.index in (None, given.device.index)
        if is_there or is_lazy(given):
            return None  # the parameter itself, so that tied ones stay tied
        moved = nn.Parameter(given.detach().to(device), given.requires_grad)
        moved.__class__ = type(given)  # the constructor of a subclass may take other arguments
        vars(moved).update(vars(given))
        return moved

    def moved_buffer(module: nn.Module, name: str, given: Tensor | None) -> Tensor | None:
        return None if given is None else given.to(device)

    hooks: list[tuple[Any, Any]] = [(register_module_parameter_registration_hook, moved_parameter)]
    with ExitStack() as stack:
        if include_buffers:
            hooks.append((register_module_buffer_registration_hook, moved_buffer))
            stack.enter_context(device)
        for register, hook in hooks:
            stack.callback(register(hook).remove)
        yield


WRAPPERS = (PreparedModule, StepForward, DistributedDataParallel, DataParallel)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the user's model, without the wrappers of `prepare` and of torch's data parallelism.

    Args:
        keep_fp32_wrapper: has no effect: a prepared model keeps its forward.
        keep_torch_compile: leave the wrapper of torch.compile on a model that has no other wrapper within it.
        recursive: replace the wrapped submodules of the model too, in place.

    >>> prepared = tw.Accelerator().prepare(model)
    >>> tw.extract_model_from_parallel(prepared) is model
    True
    """
    inner = _unwrapped(model, keep_torch_compile)
    if recursive:
        # A list, because children are replaced meanwhile.
        for parent in list(inner.modules()):
            for name, child in parent.named_children():
                if isinstance(child, WRAPPERS):
                    setattr(parent, name, _unwrapped(child, keep_torch_compile))
    return inner


def _unwrapped(model: nn.Module, keeps_compiled: bool) -> nn.Module:
    inner = model
    while isinstance(inner, WRAPPERS) or is_compiled(inner):
        compiled = inner if is_compiled(inner) else None
        inner = getattr(inner, "module" if compiled is None else WRAPPER)
        if compiled is not None and keeps_compiled and not isinstance(inner, WRAPPERS):
            return compiled
    return inner
