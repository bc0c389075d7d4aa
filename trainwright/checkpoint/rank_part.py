"""A rank's part of a sharded tensor, as hooks see it at a save: it knows which range of the whole it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from trainwright.checkpoint.tensors import Piece
from trainwright.errors import CheckpointError


class RankPart(Tensor):
    """A range of a tensor whose other ranges are on other ranks; made by `shown`.

    An elementwise result is the same range of the whole result, so it can be stored under any name. A result of another shape
    (a norm, a slice) corresponds to no range of anything, and cannot be stored.
    """

    source: Piece
    """The piece that it is, or was computed from."""
    is_range: bool
    """Whether its elements still correspond one to one to the source's range."""

    @classmethod
    def of(cls, tensor: Tensor, source: Piece, is_range: bool) -> RankPart:
        """Return a tensor, in the same memory, as a part."""
        part = tensor.detach().as_subclass(cls)
        part.source, part.is_range = source, is_range
        return part

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        parts = [each for each in tree_leaves((args, kwargs)) if isinstance(each, RankPart)]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            ranges = {(each.source.shape, each.source.start) for each in parts}
            are_ranges = len(ranges) == 1 and all(each.is_range for each in parts)

            def derived(tensor: Tensor) -> Tensor:
                if isinstance(tensor, RankPart):  # changed in place, or returned unchanged
                    tensor.is_range = tensor.is_range and are_ranges
                    return tensor
                is_range = are_ranges and tensor.shape == parts[0].source.tensor.shape
                return RankPart.of(tensor, parts[0].source, is_range)

            return tree_map_only(Tensor, derived, result)

    def __deepcopy__(self, memo: Any) -> RankPart:
        copied: RankPart = self.clone()  # type: ignore[assignment]
        return copied


def shown(piece: Piece) -> Tensor:
    """Return a piece's tensor for hooks: a whole one, or this rank's part. It is the memory in use."""
    if piece.is_whole and piece.tensor.shape != piece.shape:  # sharded, but this rank holds all of it
        piece = replace(piece, tensor=piece.tensor.view(piece.shape))
    if piece.is_whole and piece.writer in (None, 0):
        return piece.tensor
    return RankPart.of(piece.tensor, piece, True)


def is_range(tensor: Tensor) -> bool:
    """Return whether a tensor is whole, or a part that still corresponds to its range."""
    return not isinstance(tensor, RankPart) or tensor.is_range


def stored(name: str, value: Tensor) -> Piece:
    """Return the piece for a tensor that hooks left in a state_dict.

    Raises:
        CheckpointError: it was computed from a part, and corresponds to no range of a whole tensor.
    """
    if not isinstance(value, RankPart):
        return Piece(name, tuple(value.shape), 0, value.detach(), 0)
    if not value.is_range:
        raise CheckpointError(
            f"on_save_checkpoint left {name!r} in the state_dict, computed from this rank's part of {value.source.name!r}; the "
            "other ranks hold the rest. Use elementwise operations on such tensors (a cast, a factor), or strategy='ddp', "
            "which keeps them whole."
        )
    return replace(value.source, name=name, tensor=value.detach().as_subclass(Tensor))
