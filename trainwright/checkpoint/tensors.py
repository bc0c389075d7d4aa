"""Pieces of tensors: the ranges on a rank, their form for hooks, their writers, and their place in files.

A piece is one contiguous range of a tensor flattened in row-major order. Every strategy's shard of a tensor is such a range.
So a checkpoint of one strategy is read under another by copying the overlaps of two lists of pieces. `shards.py` reads and
writes the files.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.checkpoint.vendor import tree_leaves, tree_map
from trainwright.errors import CheckpointError

__all__ = ["DTYPE_NAMES", "TensorEntry"]

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """One contiguous range of a tensor on this rank. A load writes it in place.

    `shape` is the shape of the whole tensor, and `start` the first element of the range in the flattened tensor. `tensor` is
    the whole tensor in any layout, or 1-D with the range. `writer` is the rank that writes it, or None if `assign_writers`
    may choose.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: Tensor
    writer: int | None = None

    def __post_init__(self) -> None:
        whole = self.start == 0 and tuple(self.tensor.shape) == tuple(self.shape)
        stop = self.start + self.tensor.numel()
        if not whole and (self.tensor.dim() != 1 or self.start < 0 or stop > math.prod(self.shape)):
            raise ValueError(
                f"the piece of {self.name!r} that starts at {self.start} has shape {tuple(self.tensor.shape)}; "
                f"expected the whole tensor of shape {tuple(self.shape)} at 0, or a 1-D range within its "
                f"{math.prod(self.shape)} elements."
            )

    @property
    def stop(self) -> int:
        """The offset after the last element."""
        return self.start + self.tensor.numel()

    @property
    def is_whole(self) -> bool:
        """Whether the range covers the tensor."""
        return self.start == 0 and self.tensor.numel() == math.prod(self.shape)


class StoredPiece(NamedTuple):
    """A range of a tensor in a file: `numel` elements from `start` on, stored under `key`."""

    file: str
    key: str
    start: int
    numel: int


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a checkpoint: its whole shape, its dtype, and its stored pieces in the order of their starts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...] = ()

    @property
    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)


def tied_groups(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Group the pieces that are the same view of the same memory (tied names). Most groups have one piece."""
    groups: dict[Hashable, list[Piece]] = {}
    for index, piece in enumerate(pieces):
        groups.setdefault(_identity(piece) or index, []).append(piece)
    return list(groups.values())


def _identity(piece: Piece) -> Hashable:
    tensor = piece.tensor
    # Freed memory, for example after FSDP, has one address for all tensors, but these are not tied.
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # quantized, which the save rejects
        return None
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == 0:
        return None
    memory = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*memory, tensor.dtype, tuple(tensor.shape), tensor.stride(), tuple(piece.shape), piece.start)


def assign_writers(pieces: Sequence[Piece], rank: int, world_size: int) -> list[Piece]:
    """Return the pieces that this rank writes, balanced by bytes. Every rank computes the same assignment."""
    if world_size == 1:
        return list(pieces)
    # Greedy by size onto the least loaded rank. Names break ties, so that the order of a rank's pieces does not matter.
    groups = tied_groups([piece for piece in pieces if piece.writer is None])
    ordered = sorted(
        groups, key=lambda group: (-group[0].tensor.nbytes, min((piece.name, piece.start) for piece in group))
    )
    loads = [(0, other) for other in range(world_size)]
    mine = {id(piece) for piece in pieces if piece.writer == rank}
    for group in ordered:
        load, chosen = heapq.heappop(loads)
        heapq.heappush(loads, (load + group[0].tensor.nbytes, chosen))
        if chosen == rank:
            mine.update(id(piece) for piece in group)
    return [piece for piece in pieces if id(piece) in mine]


def merge(tables: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Merge the tables of several files for one section, and check that every element is stored exactly once."""
    merged: dict[str, TensorEntry] = {}
    parts: dict[str, list[StoredPiece]] = {}
    for table in tables:
        for name, entry in table.items():
            known = merged.setdefault(name, TensorEntry(entry.shape, entry.dtype))
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                raise CheckpointError(
                    f"the ranks disagree on tensor {name!r}: shape {known.shape} and {known.dtype} on one, shape "
                    f"{entry.shape} and {entry.dtype} on another. Pass pieces with the shape of the whole tensor."
                )
            parts.setdefault(name, []).extend(entry.pieces)
    for name, entry in merged.items():
        pieces = sorted(parts[name], key=attrgetter("start", "numel"))
        # Several ranks may store an empty tensor, of which one piece without elements suffices.
        merged[name] = replace(entry, pieces=tuple(pieces if entry.numel else pieces[:1]))
        check_coverage(name, merged[name])
    return merged


def check_coverage(name: str, entry: TensorEntry) -> None:
    """Raise an error if the pieces, in the order of their starts, do not cover every element exactly once."""
    numel, reached = entry.numel, 0
    for piece in entry.pieces:
        if piece.start > reached:
            break
        if piece.start < reached:
            raise CheckpointError(
                f"tensor {name!r}: elements from {piece.start} on are stored twice (once in {piece.file}). A range must have "
                "one writer."
            )
        reached = piece.start + piece.numel
    if reached != numel:
        raise CheckpointError(f"tensor {name!r} is incomplete: element {reached} of {numel} is in no file.")


class RankPart(Tensor):
    """A range of a tensor whose other ranges are on other ranks. `shown` makes it for hooks at a save.

    An elementwise result is the same range of the whole result, so it can be stored under any name. A result of a different
    shape (a norm, a slice) corresponds to no range, and cannot be stored.
    """

    source: Piece
    """The piece itself, or the piece from which this tensor was computed."""
    is_range: bool
    """Whether the elements still correspond one to one to the source's range."""

    @classmethod
    def of(cls, tensor: Tensor, source: Piece, is_range: bool) -> RankPart:
        """Return a tensor as a part, in the same memory."""
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
        parts = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RankPart)]
        # So results are plain tensors, and no operation in here calls this method again.
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            ranges = {(part.source.shape, part.source.start) for part in parts}
            are_ranges = len(ranges) == 1 and all(part.is_range for part in parts)

            def derived(tensor: Tensor) -> Tensor:
                if isinstance(tensor, RankPart):  # changed in place, or returned unchanged
                    tensor.is_range = tensor.is_range and are_ranges
                    return tensor
                is_range = are_ranges and tensor.shape == parts[0].source.tensor.shape
                return RankPart.of(tensor, parts[0].source, is_range)

            return tree_map(lambda leaf: derived(leaf) if isinstance(leaf, Tensor) else leaf, result)

    def __deepcopy__(self, memo: Any) -> RankPart:
        copied: RankPart = self.clone()  # type: ignore[assignment]
        return copied


def shown(piece: Piece) -> Tensor:
    """Return a piece's tensor for hooks, the whole tensor or this rank's part. It shares the memory in use."""
    if piece.is_whole and piece.tensor.shape != piece.shape:  # sharded, but this rank has all of it
        piece = replace(piece, tensor=piece.tensor.view(piece.shape))
    if piece.is_whole and piece.writer in (None, 0):
        return piece.tensor
    return RankPart.of(piece.tensor, piece, True)


def is_range(tensor: Tensor) -> bool:
    """Return whether a tensor is whole, or a part that still corresponds to its range."""
    return not isinstance(tensor, RankPart) or tensor.is_range


def stored(name: str, value: Tensor) -> Piece:
    """Return the piece for a tensor in a state_dict from hooks. CheckpointError if it corresponds to no range."""
    if not isinstance(value, RankPart):
        return Piece(name, tuple(value.shape), 0, value.detach(), 0)
    if not value.is_range:
        raise CheckpointError(
            f"on_save_checkpoint left {name!r} in the state_dict, computed from this rank's part of {value.source.name!r}; "
            "the other ranks hold the rest. Use elementwise operations on such tensors (a cast, a factor), or "
            "strategy='ddp', which keeps them whole."
        )
    return replace(value.source, name=name, tensor=value.detach().as_subclass(Tensor))
