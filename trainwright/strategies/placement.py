"""Placement: moves modules to a device, and initialises modules that were created on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.value_kinds import is_dtensor

Occurrences = dict[Tensor, list[tuple[dict[str, Any], str]]]
"""Where a tensor occurs: the tables of modules that hold it, and its names in them."""


def move(module: nn.Module, device: torch.device, stays: Callable[[Tensor], bool] | None = None) -> None:
    """Move a module to a device in place, except tensors that `stays` selects. Tied weights stay tied."""
    places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for _, name, tensor in _own_tensors(owner):
            places.setdefault(tensor, []).append((owner, name))
    if stays is None:
        module.to(device)
    else:
        module._apply(lambda tensor: tensor if stays(tensor) else tensor.to(device))  # type: ignore[no-untyped-call]
    for (first, key), *others in places.values():  # some backends make a tensor for every place
        for owner, name in others:
            if getattr(owner, name) is not getattr(first, key):
                setattr(owner, name, getattr(first, key))


def materialize(module: nn.Module, parts: Sequence[nn.Module] | None = None) -> bool:
    """Replace a module's meta tensors by real ones, initialised as by its constructors, and return whether there were any.

    Values are drawn on the host, in the order of the constructors. Writes outside of `reset_parameters` are
    lost, so they are rejected. `parts` limits this to some submodules, in that order. Tied tensors of the whole module stay
    tied.
    """
    meta: Occurrences = {}
    for each in module.modules():
        for table, name, tensor in _own_tensors(each):
            if tensor.is_meta and not is_dtensor(tensor):
                meta.setdefault(tensor, []).append((table, name))
    if not meta:
        return False
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for each in innermost_first(module) if parts is None else parts:
            replaced.update((id(new), (old, new)) for old, new in _initialise(each, meta))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if id(tensor) not in replaced:
            continue
        before, after = (each._version for each in replaced[id(tensor)])
        if after == 0 or before != after:
            how = "no reset_parameters sets it" if after == 0 else "it was set in other ways than by reset_parameters"
            raise ValueError(
                f"{name!r} of {type(module).__name__} was made on the meta device, where values are lost, and {how}. Give its "
                "module a reset_parameters() that sets it, or make the module on a real device."
            )
    return True


def _initialise(module: nn.Module, meta: Occurrences) -> list[tuple[Tensor, Tensor]]:
    """Replace a module's direct meta tensors wherever they occur, and reset it. Return the old and new tensors."""
    made: list[tuple[Tensor, Tensor]] = []
    others: list[tuple[dict[str, Any], str, Tensor]] = []
    for table, name, tensor in list(_own_tensors(module)):
        if tensor in meta:
            made.append((tensor, _empty(tensor)))
            for its_table, its_name in meta.pop(tensor):
                its_table[its_name] = made[-1][1]
        elif not any(tensor is new for _, new in made):
            others.append((table, name, tensor))
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if made and callable(reset):
        for table, name, tensor in others:  # real, or tied to an earlier module: discard the reset's values
            table[name] = _empty(tensor)
        reset()
        for table, name, tensor in others:
            table[name] = tensor
    return made


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="cpu")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _own_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                yield table, name, tensor


def innermost_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and its submodules, children first, as their constructors finish."""
    seen: set[nn.Module] = set()

    def walk(each: nn.Module) -> Iterator[nn.Module]:
        if each in seen:
            return
        seen.add(each)
        for child in each.children():
            yield from walk(child)
        yield each

    return walk(module)
