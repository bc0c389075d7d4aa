"""Dispatched loaders: only rank 0 reads the data, and it sends every rank a batch.

For data that only one process can read, or that differs between ranks. A round is one batch per rank, and batches stay
whole. If the last round has fewer batches, a rank without a batch works on the first batch with weight zero. The position
of rank 0's loader travels with every batch. So the checkpoint looks the same as with other loaders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from trainwright.checkpoint.codec import decode, encode
from trainwright.data.batch_stream import round_sizes, sample_counts
from trainwright.data.loader_state import StatefulLoader
from trainwright.data.loaders import ShardedLoader
from trainwright.data.source_state import SourceState
from trainwright.data.stream_shard import StreamPosition
from trainwright.distributed.collectives import scatter_nests
from trainwright.distributed.ranks import Ranks

Nest = tuple[Any, Mapping[str, Tensor]]
"""Plain data, and its tensors by name."""


class DispatchedLoader(StatefulLoader):
    """One rank's batches of a loader that rank 0 reads. Collective: create it, begin an epoch and iterate on every rank.

    Args:
        loader: rank 0's DataLoader. The other ranks' loaders are not read.
        batch_parts: see ShardedLoader.

    Raises:
        ValueError: on every rank, if rank 0's loader cannot be dispatched.
    """

    shards = ()

    def __init__(self, loader: Any, ranks: Ranks, *, batch_parts: int = 1) -> None:
        super().__init__(loader, ranks.rank)
        self._ranks, self.world_size = ranks, ranks.world_size
        self.uneven: dict[int, list[int]] = {}
        self.seeks = False
        """Whether an epoch can begin at any batch without reading the batches before."""
        self._inner: ShardedLoader | None = None
        self._start = self._inner_start = 0
        self._lengths: list[int | None] = [None, None, None]
        """The length of an epoch, its whole length and its exact length."""
        self._positions: dict[int, Sequence[StreamPosition]] = {}
        """Rank 0's positions after the latest rounds, by this rank's count of batches."""

        def begin() -> list[Any]:
            self._inner = ShardedLoader(loader, rank=0, world_size=1, mode="train", batch_parts=batch_parts)
            self._inner.read_ahead()
            exact = self._inner.exact_length
            if exact is not None and 0 < exact < self.world_size and self._drops_short_round:
                raise ValueError(
                    f"the data has {exact} batches for {self.world_size} ranks, and drop_last drops a short round. Use fewer "
                    "devices, a smaller batch_size, more data, or drop_last=False."
                )
            return [self._inner.stream is not None, self._measured()]

        self.seeks, self._lengths = ranks.decide(begin, "the preparation of a dispatched loader")

    def plan_states(self, batches: Sequence[tuple[int, int]]) -> None:
        if self._inner is not None:
            ranks = self.world_size
            self._inner.plan_states([(every * ranks, self._inner_start + batch * ranks) for every, batch in batches])

    def set_epoch(self, seed: int, epoch: int, start_batch: int = 0) -> None:
        """See StatefulLoader. Collective."""
        begun = self._loaded["places"]
        self._start = start_batch
        self._inner_start = begun[0]["batch"] if begun else start_batch * self.world_size
        self.uneven.clear()
        self._positions = {start_batch: begun}

        def begin() -> list[int | None]:
            assert self._inner is not None
            self._inner.load_state_dict(self._loaded)
            self._inner.set_epoch(seed, epoch, self._inner_start)
            return self._measured()

        self._lengths = self._ranks.decide(begin, "the start of an epoch of a dispatched loader")

    def batches(self) -> Iterator[Any]:
        rounds = None if self._inner is None else self._rounds(self._inner)
        number = self._start
        while True:
            header, batch = self._received(rounds)
            if header["end"]:
                return
            if header["sizes"]:
                self.uneven[number] = header["sizes"]
            number += 1
            # The positions before and after the round that is read ahead.
            self._positions = {end: position for end, position in self._positions.items() if end >= number - 2}
            self._positions[number] = [header["position"]]
            yield batch

    @property
    def length(self) -> int | None:
        return self._lengths[0]

    @property
    def whole_length(self) -> int | None:
        return self._lengths[1]

    @property
    def exact_length(self) -> int | None:
        return self._lengths[2]

    def combined(self, lengths: list[int | None]) -> int | None:
        return lengths[0]

    def positions(self, batch: int) -> list[StreamPosition]:
        return list(self._positions.get(batch, ()))

    def source_states(self, positions: Sequence[StreamPosition], is_over: bool) -> list[SourceState | None]:
        if self._inner is None:
            return []  # rank 0 has them
        if not positions:
            positions = self._inner.positions(self._inner_start)
        return self._inner.source_states(positions, is_over)

    @property
    def _drops_short_round(self) -> bool:
        return getattr(self.loader, "drop_last", False) is True

    def _measured(self) -> list[int | None]:
        """Return the lengths in rounds, computed from the lengths of rank 0's loader in batches."""
        assert self._inner is not None

        def rounds(batches: int | None, start: int, inner_start: int) -> int | None:
            if batches is None:
                return None
            whole, left = divmod(max(0, batches - inner_start), self.world_size)
            return start + whole + (left > 0 and not self._drops_short_round)

        inner, starts = self._inner, (self._start, self._inner_start)
        return [rounds(inner.length, *starts), rounds(inner.whole_length, 0, 0), rounds(inner.exact_length, *starts)]

    def _rounds(self, inner: ShardedLoader) -> Iterator[list[Nest]]:
        """Yield the rounds as lists of nests, one nest per rank with a header and a batch. Called on rank 0."""
        indices, ranks, count = inner.note_indices(), self.world_size, self._inner_start
        items = iter(inner)
        batches = list(islice(items, ranks))
        while batches:
            # Read before this round is sent, because only a last round may be uneven.
            following = list(islice(items, 1))
            if len(batches) < ranks and self._drops_short_round:
                break
            count += len(batches)
            counts = [sample_counts(batch) if indices is None else [len(indices.popleft())] for batch in batches]
            sizes = [] if following else round_sizes(counts, ranks)
            header = {"end": False, "sizes": sizes, "position": inner.positions(count)[0]}
            padded = [*batches, *[batches[0]] * (ranks - len(batches))]
            yield [encode([header, _plainer(batch)], "the batch") for batch in padded]
            batches = [*following, *islice(items, ranks - 1)] if following else []
        yield [encode([{"end": True}, None])] * ranks

    def _received(self, rounds: Iterator[list[Nest]] | None) -> Any:
        """Return this rank's header and batch of rank 0's next round.

        If rank 0 fails to read it, raise RuntimeError on the other ranks.
        """
        parts, failure = None, None
        try:
            parts = None if rounds is None else next(rounds)
        except Exception as error:  # the other ranks wait for an answer
            failure = error
            text = f"{type(error).__name__}: {error}"
            parts = [encode([{"end": True, "error": text}, None])] * self.world_size
        plain, tensors = scatter_nests(parts)
        if failure is not None:
            raise failure
        header, batch = decode(plain, tensors)
        if "error" in header:
            raise RuntimeError(f"rank 0, which reads the data of all ranks, failed to read a batch: {header['error']}")
        return header, batch


def _plainer(batch: Any) -> Any:
    """Return a batch with plain dicts for other mappings, so that every rank gets the same types."""
    if isinstance(batch, Mapping):
        return {key: _plainer(value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_plainer(item) for item in batch)
    return batch
