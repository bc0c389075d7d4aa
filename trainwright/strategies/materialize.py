"""Materialize: real values for modules that were made on the meta device, by the resets that their constructors called."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

REMEDY = "Give its module a reset_parameters() that sets it, or make the module on a real device."


def materialize(module: nn.Module, device: torch.device) -> dict[Tensor, Tensor]:
    """Replace the module's meta tensors by real ones, initialised as its constructors would have; return new by old.

    Each submodule's own `reset_parameters` is called, innermost first, which draws the numbers in the order in which
    constructors draw them. What else was done to a tensor on the meta device is lost there, so it is refused: torch counts
    how often a tensor was changed in place, and both counts have to agree. Tied tensors stay tied.

    Raises:
        ValueError: a tensor that no reset gives its values; it is named.
    """
    replaced = _replace(module, device)
    if not replaced:
        return {}
    with torch.no_grad():
        for each in _innermost_first(module):
            reset = getattr(each, "reset_parameters", None) or getattr(each, "_reset_parameters", None)
            own = {id(tensor) for _, tensor in _own_tensors(each)}
            if callable(reset) and any(id(new) in own for new in replaced.values()):
                reset()
    counts = {id(new): (old._version, new._version) for old, new in replaced.items()}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        before, after = counts.get(id(tensor), (1, 1))
        if after == 0 or before != after:
            how = "no reset_parameters sets it" if after == 0 else "it was set in other ways than by reset_parameters"
            raise ValueError(
                f"{name!r} of {type(module).__name__} was made on the meta device, where values are lost, and {how}. {REMEDY}"
            )
    return replaced


def _replace(module: nn.Module, device: torch.device) -> dict[Tensor, Tensor]:
    replaced: dict[Tensor, Tensor] = {}
    for each in module.modules():
        for name, tensor in list(_own_tensors(each)):
            if not tensor.is_meta or isinstance(tensor, DTensor):
                continue
            if tensor not in replaced:
                empty = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                replaced[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            tensors = each._parameters if name in each._parameters else each._buffers
            tensors[name] = replaced[tensor]  # type: ignore[assignment]
    return replaced


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor


def _innermost_first(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()

    def walk(each: nn.Module) -> Iterator[nn.Module]:
        if each in seen:
            return
        seen.add(each)
        for child in each.children():
            yield from walk(child)
        yield each

    return walk(module)
