"""Materialize: real values for modules that were made on the meta device, by the resets that their constructors called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

REMEDY = "Give its module a reset_parameters() that sets it, or make the module on a real device."

Places = dict[Tensor, list[tuple[dict[str, Any], str]]]
"""Where each meta tensor stands: in which tables of which modules, by which name."""


def materialize(module: nn.Module, parts: Sequence[nn.Module] | None = None) -> bool:
    """Replace the module's meta tensors by real ones in host memory, initialised as its constructors would have.

    Returns whether there was any.

    They are drawn on the host whatever device they go to: the numbers of its generator are those of a module that was made on
    the host, and every device draws others.

    Each submodule's own `reset_parameters` is called, innermost first, which draws the numbers in the order in which
    constructors draw them, as long as modules are registered as they are made; copies of a module draw numbers of their
    own. What else was done to a tensor on the meta device is lost there, so it is refused: torch counts
    how often a tensor was changed in place, and both counts have to agree. Tied tensors stay tied, with the values of the
    first module that has them.

    Args:
        module: what the tensors are named after, and where tied ones are looked for.
        parts: the submodules whose own tensors are replaced, in that order; all of them where it is not given.

    Raises:
        ValueError: a tensor that no reset gives its values; it is named.
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
    """Replace one module's own meta tensors wherever they stand, and reset it; yield the old and new ones."""
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
        for table, name, tensor in others:  # tied to a module before, or real: what a reset draws for it is dropped
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
    """Yield a module and all in it, each after what it holds: as their constructors end."""
    seen: set[nn.Module] = set()

    def walk(each: nn.Module) -> Iterator[nn.Module]:
        if each in seen:
            return
        seen.add(each)
        for child in each.children():
            yield from walk(child)
        yield each

    return walk(module)
