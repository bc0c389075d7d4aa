"""Loader state: the position of a training loader in its data, as plain data that a checkpoint holds.

`state_dict` and `load_state_dict` have the names and the meaning of torchdata's StatefulDataLoader. A loop passes the number of
batches that it has consumed, since the loader itself may have been read ahead; it keeps nothing of the position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from trainwright.data.source_state import SourceState
from trainwright.data.stream_shard import StreamPosition, StreamShard


class LoaderState(TypedDict):
    """The position of a loader, with one entry for each of the user's loaders that it combines."""

    places: Sequence[StreamPosition]
    """What all ranks together consumed of the epoch, the same on every rank; empty at an epoch's start."""
    sources: Sequence[SourceState | None]
    """The state of each loader's source as this rank sees it; None for a source without a state."""


NOT_BEGUN = LoaderState(places=(), sources=())
"""The position at an epoch's start, of sources as they were given."""


class StatefulLoader(ABC):
    """What has a position in its data. A subclass finds the position and begins an epoch there."""

    shards: Sequence[StreamShard]
    """Which batches of each of the user's loaders are this rank's."""
    uneven: Mapping[int, list[int]]
    """Samples per rank (or numbers in their proportion) of each uneven round reached so far, by batch number: a live view."""

    def __init__(self, loader: Any, rank: int) -> None:
        self.loader, self.rank = loader, rank
        self._loaded = NOT_BEGUN
        """Where the next epoch begins; empty once it has begun."""

    def state_dict(self, batch: int, *, is_over: bool = False) -> LoaderState:
        """Return the position after this many batches of this rank in the epoch, or what an epoch that is over leaves."""
        if any(self._loaded.values()):
            return self._loaded
        positions = self.positions(batch)
        return {"places": positions if batch and not is_over else [], "sources": self.source_states(positions, is_over)}

    def load_state_dict(self, state: LoaderState) -> None:
        """Let the next epoch begin at a position that was saved at any world size."""
        self._loaded = state

    def __iter__(self) -> Iterator[Any]:
        self._loaded = NOT_BEGUN  # from here on the position follows from the batches consumed
        return self.batches()

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"this {type(self.loader).__name__} has no length.")
        return self.length

    def weight_at(self, index: int) -> float:
        """Return this rank's part in the mean over the round of a batch, relative to an equal part."""
        sizes = self.uneven.get(index)
        return 1.0 if sizes is None else sizes[self.rank] * len(sizes) / sum(sizes)

    @abstractmethod
    def set_epoch(self, seed: int, epoch: int, start_batch: int = 0) -> None:
        """Choose the order of the next `iter`, a function of seed and epoch, and the batch that it starts with.

        The loaded position says what was consumed before the start. Without one, `start_batch` batches were at this world size.
        """

    @abstractmethod
    def batches(self) -> Iterator[Any]:
        """Return this rank's batches from the start that was chosen."""

    def plan_states(self, batches: Sequence[tuple[int, int]]) -> None:
        """Choose the batches of this rank after which sources' states are taken: pairs of an interval and one such batch."""
        for shard in self.shards:
            shard.plan_states(batches)

    @property
    def starts_beyond(self) -> bool:
        """Return whether the start lies beyond the end of the data."""
        return any(shard.starts_beyond for shard in self.shards)

    @property
    def length(self) -> int | None:
        """Return the batches of this rank in a whole epoch; None if a loader has no length."""
        return self.combined([shard.length for shard in self.shards])

    @property
    def whole_length(self) -> int | None:
        """Return the length of an epoch that runs at this world size from its start."""
        return self.combined([shard.whole_length for shard in self.shards])

    @property
    def exact_length(self) -> int | None:
        """Return the length if it is certain: of an index stream or a list, not a loader's estimate."""
        return None if any(shard.exact_source_length is None for shard in self.shards) else self.length

    @abstractmethod
    def combined(self, lengths: list[int | None]) -> int | None:
        """Return the length of an epoch, from those of the shards."""

    @abstractmethod
    def positions(self, batch: int) -> list[StreamPosition]:
        """Return the position of each stream after this many batches of this rank in the epoch."""

    @abstractmethod
    def source_states(self, positions: Sequence[StreamPosition], is_over: bool) -> list[SourceState | None]:
        """Return each source's state at its position, or the latest known before it; at its end if the epoch is over."""
