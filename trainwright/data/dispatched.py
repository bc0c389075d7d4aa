"""Dispatched loaders: rank 0 alone reads the data, and sends every rank its batch.

For data that only one process can read, or that differs from rank to rank. A round is one batch for each rank; batches stay
whole. In a last round with fewer batches a rank without one works on the first with weight zero. The position in the data is
that of rank 0's loader, and travels with each batch, so a checkpoint is the same as of other loaders.
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
"""Plain data, and the tensors in it by name."""


class DispatchedLoader(StatefulLoader):
    """One rank's batches of a loader that rank 0 reads. Collective: create it, begin an epoch and iterate on every rank.

    Args:
        loader: rank 0's DataLoader; those of other ranks are not read.
        batch_parts: see ShardedLoader.

    Raises:
        ValueError: on every rank, if rank 0's loader cannot be read so.
    """

    shards = ()

    def __init__(self, loader: Any, ranks: Ranks, *, batch_parts: int = 1) -> None:
        super().__init__(loader, ranks.rank)
        self._ranks, self.world_size = ranks, ranks.world_size
        self.uneven: dict[int, list[int]] = {}
        self.seeks = False
        """Whether an epoch can begin at any batch without reading those before."""
        self._inner: ShardedLoader | None = None
        self._start = self._inner_start = 0
        self._lengths: list[int | None] = [None, None, None]
        """The length of an epoch, its whole length and its exact length."""
        self._positions: dict[int, Sequence[StreamPosition]] = {}
        """Rank 0's positions after the latest rounds, by this rank's number of batches."""

        def begin() -> list[Any]:
            self._inner = ShardedLoader(loader, rank=0, world_size=1, mode="train", batch_parts=batch_parts)
            self._inner.read_ahead()
            exact = self._inner.exact_length
            if exact is not None and 0 < exact < self.world_size and self._drops_short_round:
                raise ValueError(
                    f"the data has {exact} batches for {self.world_size} ranks, and drop_last drops a short round; use fewer "
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
            self._positions = {
                each: position for each, position in self._positions.items() if each >= number - 2
            }  # the round that is read ahead, and the one before
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
        """Return the lengths in rounds, from those of rank 0's loader in batches."""
        assert self._inner is not None

        def rounds(batches: int | None, start: int, inner_start: int) -> int | None:
            if batches is None:
                return None
            whole, left = divmod(max(0, batches - inner_start), self.world_size)
            return start + whole + (left > 0 and not self._drops_short_round)

        inner, starts = self._inner, (self._start, self._inner_start)
        return [rounds(inner.length, *starts), rounds(inner.whole_length, 0, 0), rounds(inner.exact_length, *starts)]

    def _rounds(self, inner: ShardedLoader) -> Iterator[list[Nest]]:
        """Yield each round as one nest for each rank: a header and a batch. On rank 0."""
        noted, ranks, count = inner.note_indices(), self.world_size, self._inner_start
        items = iter(inner)
        held = list(islice(items, ranks))
        while held:
            # Read before this round is sent, because only a last round may be uneven.
            following = list(islice(items, 1))
            if len(held) < ranks and self._drops_short_round:
                break
            count += len(held)
            counts = [sample_counts(batch) if noted is None else [len(noted.popleft())] for batch in held]
            sizes = [] if following else round_sizes(counts, ranks)
            header = {"end": False, "sizes": sizes, "position": inner.positions(count)[0]}
            yield [
                encode([header, _plainer(held[rank if rank < len(held) else 0])], "the batch") for rank in range(ranks)
            ]
            held = [*following, *islice(items, ranks - 1)] if following else []
        yield [encode([{"end": True}, None])] * ranks

    def _received(self, rounds: Iterator[list[Nest]] | None) -> Any:
        """Return this rank's header and batch of the next of rank 0's rounds.

        RuntimeError on the other ranks if rank 0 fails to read it.
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
    """Return a batch with plain dicts for other mappings, as every rank has to get the same types."""
    if isinstance(batch, Mapping):
        return {key: _plainer(each) for key, each in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_plainer(each) for each in batch)
    return batch
