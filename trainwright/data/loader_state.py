"""Loader state: the position of a training loader in its data, as plain data for a checkpoint.

`state_dict` and `load_state_dict` have the names and the meaning of torchdata's StatefulDataLoader. A loop passes the
number of batches that it has consumed, since the loader may have been read ahead. The loop stores no other part of the
position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from trainwright.data.source_state import SourceState
from trainwright.data.stream_shard import StreamPosition, StreamShard


class LoaderState(TypedDict):
    """The position of a loader, with one entry per user's loader in a combination."""

    places: Sequence[StreamPosition]
    """The part of the epoch that all ranks together consumed, the same on every rank; empty at an epoch's start."""
    sources: Sequence[SourceState | None]
    """The states of the loaders' sources as this rank sees them; None for a source without a state."""


NOT_BEGUN = LoaderState(places=(), sources=())
"""The position at the start of an epoch, with fresh sources."""


class StatefulLoader(ABC):
    """A loader with a position in its data. A subclass finds the position and begins an epoch there."""

    shards: Sequence[StreamShard]
    """This rank's shards of the user's loaders."""
    uneven: Mapping[int, list[int]]
    """Samples per rank (or proportional numbers) of the uneven rounds so far, by batch number: a live view."""

    def __init__(self, loader: Any, rank: int) -> None:
        self.loader, self.rank = loader, rank
        self._loaded = NOT_BEGUN
        """The start of the next epoch; empty once that epoch has begun."""

    def state_dict(self, batch: int, *, is_over: bool = False) -> LoaderState:
        """Return the position after this many batches of this rank in the epoch, or at the end of an epoch that is over."""
        if any(self._loaded.values()):
            return self._loaded
        positions = self.positions(batch)
        return {"places": positions if batch and not is_over else [], "sources": self.source_states(positions, is_over)}

    def load_state_dict(self, state: LoaderState) -> None:
        """Begin the next epoch at this position, which may come from any world size."""
        self._loaded = state

    def __iter__(self) -> Iterator[Any]:
        self._loaded = NOT_BEGUN  # from now on the consumed batches determine the position
        return self.batches()

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"this {type(self.loader).__name__} has no length.")
        return self.length

    def weight_at(self, index: int) -> float:
        """Return this rank's weight in the mean over a batch's round, relative to an equal part."""
        sizes = self.uneven.get(index)
        return 1.0 if sizes is None else sizes[self.rank] * len(sizes) / sum(sizes)

    @abstractmethod
    def set_epoch(self, seed: int, epoch: int, start_batch: int = 0) -> None:
        """Choose the order of the next `iter`, a function of seed and epoch, and its first batch.

        The loaded position tells how much was consumed before the start. Without a loaded position it was `start_batch`
        batches at this world size.
        """

    @abstractmethod
    def batches(self) -> Iterator[Any]:
        """Return this rank's batches from the chosen start on."""

    def plan_states(self, batches: Sequence[tuple[int, int]]) -> None:
        """Take the sources' states after these batches of this rank: pairs of an interval and one such batch."""
        for shard in self.shards:
            shard.plan_states(batches)

    @property
    def starts_beyond(self) -> bool:
        """Return whether the start lies beyond the end of the data."""
        return any(shard.starts_beyond for shard in self.shards)

    @property
    def length(self) -> int | None:
        """Return the batches of this rank in a whole epoch, or None if a loader has no length."""
        return self.combined([shard.length for shard in self.shards])

    @property
    def whole_length(self) -> int | None:
        """Return the length of an epoch that runs from its start at this world size."""
        return self.combined([shard.whole_length for shard in self.shards])

    @property
    def exact_length(self) -> int | None:
        """Return the length of an index stream or a list, or None if the length is a loader's estimate."""
        return None if any(shard.exact_source_length is None for shard in self.shards) else self.length

    @abstractmethod
    def combined(self, lengths: list[int | None]) -> int | None:
        """Return the length of an epoch from the lengths of the shards."""

    @abstractmethod
    def positions(self, batch: int) -> list[StreamPosition]:
        """Return the positions of the streams after this many batches of this rank in the epoch."""

    @abstractmethod
    def source_states(self, positions: Sequence[StreamPosition], is_over: bool) -> list[SourceState | None]:
        """Return the sources' states at their positions, or the latest before them; at their ends if the epoch is over."""
