"""The index stream: the samples of one rank's batches, drawn from the user's sampler.

Every rank walks the whole stream of the loader's batch sampler under a seed of (seed, epoch), and takes its shard
(stream_shard.py). So the order is a pure function of (seed, epoch) and can start at any item. No sampler is rebuilt. If
torch's BatchSampler makes the batches, a short or uneven last round of training is re-split sample by sample. Batches of a
user's batch sampler stay whole.
"""

from __future__ import annotations

import copy
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from numpy import ndarray
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from trainwright.data.buckets import LengthBucketSampler
from trainwright.data.seeding import IsolatedGenerators, SamplerGenerators, derive_seed
from trainwright.data.stream_shard import Mode as Mode
from trainwright.data.stream_shard import Slices, StreamPosition, StreamShard, even_sizes
from trainwright.data.workers import SeededBatch, SeededIndex

CHUNK = 256
"""Batches of torch's samplers drawn at once, because swapping RNG states costs about as much as drawing 100 batches."""

RECENT = 64
"""Batches whose indices are kept for messages about workers."""


class IndexStream(StreamShard):
    """The batch sampler of one rank, around the loader's batch sampler.

    If `batched`, an item of the source is a list of indices. `seed_rank` is the rank that seeds the batches.
    `same_on_ranks` is False if every rank has a separate source. With `gives_seeds` items carry a seed for the worker that
    fetches them.
    """

    def __init__(
        self,
        source: Any,
        *,
        batched: bool,
        rank: int,
        world_size: int,
        mode: Mode,
        cycles: bool,
        seed_rank: int,
        same_on_ranks: bool,
        gives_seeds: bool,
    ) -> None:
        super().__init__(source, rank=rank, world_size=world_size, mode=mode, cycles=cycles)
        self.batched, self.gives_seeds = batched, gives_seeds
        self.seed_rank, self._same_on_ranks = seed_rank, same_on_ranks
        self._trimmed = 0
        """Samples that are missing from the first batch, because they were consumed."""
        self._resumed_at: StreamPosition | None = None
        """The position that was passed as the start."""
        self._noted: deque[list[Any]] | None = None
        self.recent: deque[tuple[int, Any]] = deque(maxlen=RECENT)
        """The latest items for workers, with the numbers of their batches."""
        count = self.source_length
        if count is not None and 0 < count < self.world_size and self.drops_short_round:
            raise ValueError(
                f"the data has {count} batches for {self.world_size} ranks, and drop_last drops a short round. "
                "Use fewer devices, a smaller batch_size, more data, or drop_last=False."
            )

    def set_epoch(self, seed: int, epoch: int, start_batch: int = 0, position: StreamPosition | None = None) -> None:
        self._trimmed, self._resumed_at = 0, position
        super().set_epoch(seed, epoch, start_batch, position)
        if self._trimmed and self.is_split:
            self.cuts[start_batch] = []  # the first round is short, so it is split by samples

    def __iter__(self) -> Iterator[Any]:
        items = self.items()
        return self._marked(items, self._noted) if self.gives_seeds or self._noted is not None else items

    def _marked(self, items: Iterator[Any], noted: deque[list[Any]] | None) -> Iterator[Any]:
        mark = SeededBatch if self.batched else SeededIndex
        for number, item in enumerate(items, start=self.start_batch):
            if noted is not None:
                noted.append(list(item) if self.batched else [item])
            if self.gives_seeds:
                item = mark(item, self.batch_seed(number), self.epoch)
                self.recent.append((number, item))
            yield item

    def note_indices(self) -> deque[list[Any]]:
        """Return a queue. Iterations that begin from now on append the indices of their batches to it."""
        self._noted = deque()
        return self._noted

    def __len__(self) -> int:
        length = self._length_of(len(self.source))
        assert length is not None
        return length

    def first_indices(self, most: int) -> list[Any]:
        """Return the first items of a copy of the user's sampler, or nothing for an iterator and for torch's plain orders."""
        sampler = copy.copy(self.source.sampler if self.is_split else self.source)
        for name, value in list(getattr(sampler, "__dict__", {}).items()):
            if isinstance(value, (list, dict, ndarray)):  # a sampler may shuffle it
                vars(sampler)[name] = copy.copy(value)
        parts = (sampler, *getattr(sampler, "__dict__", {}).values())
        if any(isinstance(part, Iterator) for part in parts) or type(sampler) in (SequentialSampler, RandomSampler):
            return []
        # An error of the sampler is raised again in the first epoch.
        with suppress(Exception), IsolatedGenerators(0).active(), SamplerGenerators(sampler, 0, 0).active():
            return list(islice(iter(sampler), most if self.is_split or not self.batched else 1))
        return []

    @property
    def order(self) -> str:
        sampler = getattr(self.source, "sampler", self.source)
        try:
            return f"{type(sampler).__name__} of {len(sampler)} samples"
        except (TypeError, NotImplementedError):
            return type(sampler).__name__

    @property
    def drops_short_round(self) -> bool:
        return self.batched and super().drops_short_round  # a DistributedSampler's drop_last is about samples

    @property
    def item_size(self) -> int:
        if not self.batched:
            return 1
        return int(self.source.batch_size) if type(self.source) is BatchSampler else 0

    def item_at(self, samples: int, was: int) -> int:
        # If a batch of the new size was consumed in part, only its rest follows.
        sampler, items = self.source.sampler if self.batched else self.source, self.source_length
        if items is not None and samples >= len(sampler):
            return items
        whole, self._trimmed = divmod(samples, self.item_size)
        return whole

    def position(self, batch: int) -> StreamPosition:
        if self._trimmed and self._resumed_at is not None and batch == self.start_batch:
            return self._resumed_at  # no position can describe this point within a batch of the new size
        return super().position(batch)

    def drawn(self, pass_number: int, start: int = 0) -> Iterable[Any]:
        is_trimmed = self._trimmed and pass_number == self.start_pass
        is_sliced = self.world_size > 1 and self.is_split and not is_trimmed
        if is_sliced and (samples := self._samples(pass_number)) is not None:
            return Slices(samples, int(self.source.batch_size), self.source.drop_last, start)
        is_plain = _is_stock(self.source, SequentialSampler)
        items = islice(self.source if is_plain else self._drawn_seeded(pass_number), start, None)
        if not is_trimmed:
            return items
        return chain((item[self._trimmed :] for item in islice(items, 1)), items)

    def _samples(self, pass_number: int) -> Sequence[int] | None:
        """Return the order of all samples in a pass, if one of torch's plain samplers makes it, and otherwise None."""
        sampler = self.source.sampler
        if type(sampler) is SequentialSampler:
            return range(len(sampler))
        is_permutation = type(sampler) is RandomSampler and not sampler.replacement
        if not is_permutation or sampler.num_samples != len(sampler.data_source):
            return None
        isolated, attributes = self._generators(pass_number)
        with isolated.active(), attributes.active():
            return array("q", sampler)

    def _generators(self, pass_number: int) -> tuple[IsolatedGenerators, SamplerGenerators]:
        """Return the global RNG states of a pass, and those of the sampler's own generators."""
        seed = self.pass_seed(pass_number)
        attributes = SamplerGenerators(self.source, seed, self.epoch, same_on_ranks=self._same_on_ranks)
        return IsolatedGenerators(derive_seed(seed, self.epoch)), attributes

    def _drawn_seeded(self, pass_number: int) -> Iterator[Any]:
        """Yield the items of one pass over the whole stream under the pass's seed."""
        isolated, attributes = self._generators(pass_number)
        if _is_stock(self.source, RandomSampler):
            stock = iter(self.source)
            with isolated.active(), attributes.active():  # a RandomSampler sets up its generator at its first item
                first = list(islice(stock, 1))
            yield from chain(first, stock)
            return
        # Skipped batches are drawn in one chunk. Then a user's sampler draws one batch at a time, because it may follow the
        # training (hard examples, a curriculum). torch's samplers and ours do not.
        skipped = self.start_item if pass_number == self.start_pass else 0
        most = CHUNK if _is_torchs(self.source) or type(self.source) is LengthBucketSampler else 1
        items: Iterator[Any] | None = None
        while True:
            size, skipped = max(skipped, most), 0
            with isolated.active(), attributes.active():
                items = iter(self.source) if items is None else items
                chunk = list(islice(items, size))
            yield from chunk
            if len(chunk) < size:
                return

    def batch_seed(self, number: int) -> int:
        """Return the seed for the augmentation of one of this rank's batches."""
        return derive_seed(self.seed, self.epoch, number, self.seed_rank)

    @property
    def is_split(self) -> bool:
        """Return whether a round may be re-split, as it may if torch's BatchSampler made its batches."""
        return self.batched and type(self.source) is BatchSampler

    def cut_round(self, items: list[Any], number: int) -> Any:
        ranks = self.world_size
        if not self.is_split:
            sizes = [len(item) if self.batched else 1 for item in items] + [0] * (ranks - len(items))
            self._record_sizes(sizes, number)
            return items[self.rank] if self.rank < len(items) else items[0]
        samples = [index for batch in items for index in batch]
        most = max(len(batch) for batch in items)
        sizes = self.cuts.get(number) or even_sizes(len(samples), ranks, most)
        self._record_sizes(sizes, number)
        start, size = sum(sizes[: self.rank]), sizes[self.rank]
        if size:
            return samples[start : start + size]
        # A rank without samples works on the first rank's samples with weight zero, so that collectives match. A single
        # sample is doubled, because a batch norm rejects it.
        part = samples[: sizes[0]]
        return part * 2 if len(part) == 1 < self.source.batch_size and number not in self.cuts else part

    def _record_sizes(self, sizes: list[int], number: int) -> None:
        if len(set(sizes)) > 1:
            self.uneven[number] = sizes

    def short_rounds(self, end: int) -> dict[int, int] | None:
        """Return the samples of the rounds before batch `end` that are not full, or None if unknown."""
        items = self.source_length
        if not self.is_split or self._trimmed or items is None:
            return None
        size, ranks, short = int(self.source.batch_size), self.world_size, {}
        samples = items * size if self.source.drop_last else len(self.source.sampler)
        number, start = self._base, self.start_item
        while number < end and items:
            rounds = self.rounds(max(0, items - start))
            left = samples - size * (start + (rounds - 1) * ranks)
            if rounds and left < size * ranks:  # only a pass's last round can be short
                short[number + rounds - 1] = left
            if not self.cycles:
                break
            number, start = number + rounds, 0
        return short


def _is_stock(source: object, kind: type) -> bool:
    """Return whether a sampler is exactly torch's sampler of a kind, or torch's BatchSampler around it."""
    return type(source) is kind or (type(source) is BatchSampler and type(source.sampler) is kind)


def _is_torchs(source: object) -> bool:
    """Return whether torch defines a sampler, and the sampler in a batch sampler."""
    parts = [source, source.sampler] if type(source) is BatchSampler else [source]
    return all(type(part).__module__.startswith("torch.utils.data.") for part in parts)


def in_dataset_order(source: Any, dataset: Any) -> tuple[Any, Any]:
    """Return a sampler in the dataset's order, and the user's sampler unless it is torch's plain shuffle."""
    sampler = source.sampler if type(source) is BatchSampler else source
    if isinstance(sampler, (SequentialSampler, list, tuple, range)) or getattr(sampler, "shuffle", None) is False:
        return source, None
    in_order: Any = sorted(sampler.indices) if isinstance(sampler, SubsetRandomSampler) else SequentialSampler(dataset)
    is_plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset)
    if sampler is not source:
        in_order = BatchSampler(in_order, source.batch_size, source.drop_last)
    return in_order, None if is_plain else sampler
