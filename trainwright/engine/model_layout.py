"""The layout of a model: its parameters and buffers by name, shape and dtype, which have to be alike on every rank.

Compared over the key-value store before the first collective on weights: tensors that differ would hang there, or be read
as one another.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, zip_longest

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainwright.compiled_names import clean_name
from trainwright.distributed.ranks import Ranks

CALL = "the comparison of the models"

Row = tuple[str, str]
"""A tensor's name, and what has to be alike of it."""


def refuse_unlike_models(module: nn.Module, ranks: Ranks) -> None:
    """Refuse a model that is not the same on every rank, on all of them alike (ValueError). Call on every rank."""
    if ranks.world_size == 1:
        return
    layouts = ranks.differing(layout_of(module), CALL)
    if not layouts:
        return
    rank = next(rank for rank, layout in enumerate(layouts) if layout != layouts[0])
    here, there = next((a, b) for a, b in zip_longest(layouts[0], layouts[rank]) if a != b)
    raise ValueError(
        f"the {type(module).__name__} of rank {rank} is another one than rank 0's: rank 0 has {_told(here)} where rank {rank} "
        f"has {_told(there)}. Every rank has to make the same model, whatever its weights: make it without asking for the "
        "rank, and freeze the same parameters everywhere."
    )


def layout_of(module: nn.Module) -> list[Row]:
    """Return the parameters, then the buffers, in the module's order."""

    def described(tensor: Tensor, kind: str) -> str:
        shape = "of a shape not known yet" if is_lazy(tensor) else f"of shape {tuple(tensor.shape)}"
        frozen = ", frozen" if kind == "parameter" and not tensor.requires_grad else ""
        return f"{kind} {shape} and {tensor.dtype}{frozen}"

    parameters = ((clean_name(name), described(each, "parameter")) for name, each in module.named_parameters())
    buffers = ((clean_name(name), described(each, "buffer")) for name, each in module.named_buffers())
    return list(chain(parameters, buffers))


def trained_names(modules: Iterable[nn.Module]) -> list[list[str]]:
    """Return the names of each module's parameters that require gradients."""
    return [[name for name, each in module.named_parameters() if each.requires_grad] for module in modules]


def _told(row: Row | None) -> str:
    return "no more" if row is None else f"{row[0]!r}, a {row[1]}"
