"""A rank's part of a sharded tensor, as hooks see it at a save: it keeps track of which range of the whole it is."""

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

    What is computed of it element by element is the same range of the result, and so it can be stored under whatever name. A
    result of another shape (a norm, a slice) is this rank's own: of which range of what, nobody can say.
    """

    source: Piece
    """The piece that it is, or was computed of."""
    is_range: bool
    """Whether its elements are still those of the source's range, one for one."""

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
                if isinstance(tensor, RankPart):  # changed in place, or given back as it was
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
    if piece.is_whole and piece.tensor.shape != piece.shape:  # a sharded one, of which this rank happens to hold all
        piece = replace(piece, tensor=piece.tensor.view(piece.shape))
    if piece.is_whole and piece.writer in (None, 0):
        return piece.tensor
    return RankPart.of(piece.tensor, piece, True)


def is_range(tensor: Tensor) -> bool:
    """Return whether a tensor is a whole one, or a part that is still the range that it was."""
    return not isinstance(tensor, RankPart) or tensor.is_range


def stored(name: str, value: Tensor) -> Piece:
    """Return the piece that a tensor which hooks have put into a state_dict stands for: a part's own range, or all of it.

    Raises:
        CheckpointError: it was computed of a part, and is no part of the result.
    """
    if not isinstance(value, RankPart):
        return Piece(name, tuple(value.shape), 0, value.detach(), 0)
    if not value.is_range:
        raise CheckpointError(
            f"on_save_checkpoint left as {name!r} in the state_dict what was computed of this rank's part of "
            f"{value.source.name!r}, which other ranks hold the rest of. Change such tensors element by element (a cast, a "
            "factor), or under strategy='ddp', which has them whole."
        )
    return replace(value.source, name=name, tensor=value.detach().as_subclass(Tensor))
