"""Materialize: initialises modules that were created on the meta device, by their constructors' resets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

REMEDY = "Give its module a reset_parameters() that sets it, or make the module on a real device."

Places = dict[Tensor, list[tuple[dict[str, Any], str]]]
"""The occurrences of each meta tensor: a module's table, and the name in it."""


def materialize(module: nn.Module, parts: Sequence[nn.Module] | None = None) -> bool:
    """Replace a module's meta tensors by real ones, initialised as its constructors would; return whether there were any.

    Values are drawn on the host, whose generator gives the numbers of a module that was created there. Each submodule's
    `reset_parameters` runs innermost first, which is the order of the constructors if modules are registered as they are
    created. Other writes to a meta tensor are lost, so they are refused: torch's count of in-place writes must equal that of
    the reset. Tied tensors stay tied, with the values of the first module that has them.

    Args:
        module: names the tensors; tied ones are searched in it.
        parts: the submodules to initialise, in order; all of them by default.

    Raises:
        ValueError: no reset initialises a tensor.
    """
    places: Places = {}
    for each in module.modules():
        for table, name, tensor in _own_tensors(each):
            if tensor.is_meta and not isinstance(tensor, DTensor):
                places.setdefault(tensor, []).append((table, name))
    if not places:
        return False
    counts: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for each in innermost_first(module) if parts is None else parts:
            for old, new in _initialise(each, places):
                counts[id(new)] = (old, new)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if id(tensor) not in counts:
            continue
        before, after = (each._version for each in counts[id(tensor)])
        if after == 0 or before != after:
            how = "no reset_parameters sets it" if after == 0 else "it was set in other ways than by reset_parameters"
            raise ValueError(
                f"{name!r} of {type(module).__name__} was made on the meta device, where values are lost, and {how}. {REMEDY}"
            )
    return True


def _initialise(module: nn.Module, places: Places) -> Iterator[tuple[Tensor, Tensor]]:
    """Replace one module's own meta tensors at all their occurrences, and reset it; yield the old and new ones."""
    made: list[tuple[Tensor, Tensor]] = []
    others: list[tuple[dict[str, Any], str, Tensor]] = []
    for table, name, tensor in list(_own_tensors(module)):
        if tensor in places:
            made.append((tensor, _empty(tensor)))
            for its_table, its_name in places.pop(tensor):
                its_table[its_name] = made[-1][1]
        elif not any(tensor is new for _, new in made):
            others.append((table, name, tensor))
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if made and callable(reset):
        for table, name, tensor in others:  # real, or tied to an earlier module: discard what the reset draws
            table[name] = _empty(tensor)
        reset()
        for table, name, tensor in others:
            table[name] = tensor
    yield from made


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
