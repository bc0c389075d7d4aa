"""The index stream: which samples make up each batch of one rank, from the loader's own sampler.

Every rank walks the whole stream of the loader's batch sampler, drawn under a seed of (seed, epoch), and takes every N-th
batch of it. So the order is a pure function of (seed, epoch), it can start at any batch, and no sampler is built anew.

    train      batches 0 .. N-1 make a round, rank r takes the r-th; the last round is re-split evenly where it is short
               or uneven, so that each rank makes the same number of steps; it weighs by its samples (`last_weight`), so a
               rank that is left without one works on another's with no weight. With drop_last a short round is dropped
    evaluate   rank r takes batches r, r + N, r + 2N ...; nothing is padded, so each sample counts once
    ghost      as evaluate, but a rank without a batch in the last round runs the first batch again, for the collectives in
               it; `real_length` tells that its results do not count
    even       as train, but the last round is padded to equal batches with samples that `real_sizes` tells apart
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from trainwright.data.seeding import SideGenerators, derive_seed
from trainwright.data.workers import SeededBatch, SeededIndex

Mode = Literal["train", "evaluate", "ghost", "even"]
DRAWN_AT_ONCE = 256  # batches; swapping generators costs about as much as drawing a hundred of them


class IndexStream:
    """The batch sampler of one rank, around the loader's own.

    Args:
        source: the loader's batch sampler (lists of indices), or its sampler where the loader makes no batches.
        batched: whether an item of the source is a list of indices.
        rank, world_size: whose share.
        mode: how the shares are cut (see the module).
    """

    def __init__(self, source: Any, *, batched: bool, rank: int, world_size: int, mode: Mode) -> None:
        self.source, self._generators = _with_own_generators(source)
        self.batched = batched
        self.rank, self.world_size, self.mode = rank, world_size, mode
        self.seed = 0
        """With the epoch, the seed of everything that the source draws."""
        self.gives_seeds = False
        """Whether each item carries a seed for the worker that fetches it."""
        self.epoch = 0
        self.start_batch = 0
        self.real_sizes: list[int] | None = None
        """Per rank, the samples of the last round that are no repeats; None until a re-split round has been drawn."""
        self._refuse_what_cannot_be_shared()

    def set_epoch(self, seed: int, epoch: int, start_batch: int = 0) -> None:
        """Choose the order that comes next, and the batch of this rank that it starts with."""
        self.seed, self.epoch, self.start_batch = seed, epoch, start_batch
        self.real_sizes = None
        for sampler in (self.source, getattr(self.source, "sampler", None)):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        share = islice(self._share(), self.start_batch, None)
        return self._seeded(share) if self.gives_seeds else share

    def __len__(self) -> int:
        """Return how many batches this rank has in an epoch, from its start; TypeError where the source has no length."""
        count, ranks = len(self.source), self.world_size
        if self.mode == "evaluate":
            return self.real_length
        rounds, left = divmod(count, ranks)
        if left == 0:
            return rounds
        return rounds if self._drops_short_round else rounds + 1

    @property
    def real_length(self) -> int:
        """Return how many batches of an evaluation count on this rank."""
        return (len(self.source) - self.rank + self.world_size - 1) // self.world_size

    @property
    def last_weight(self) -> float:
        """Return this rank's part in the last round's mean, as a factor of the equal part that a rank usually has."""
        if self.real_sizes is None:
            return 1.0
        return self.real_sizes[self.rank] * self.world_size / sum(self.real_sizes)

    def _drawn(self) -> Iterator[Any]:
        """Yield the items of the whole stream, drawn in chunks under the seed of this epoch."""
        for generator, original in self._generators:
            generator.manual_seed(derive_seed(self.seed, self.epoch, original))
        if _is_stock(self.source, SequentialSampler):
            yield from self.source
            return
        side = SideGenerators(derive_seed(self.seed, self.epoch))
        if _is_stock(self.source, RandomSampler):
            stock = iter(self.source)
            with side.drawn():
                first = list(islice(stock, 1))  # it draws the seed of a generator of its own, and no more
            yield from first
            yield from stock
            return
        items: Iterator[Any] | None = None
        while True:
            with side.drawn():
                items = iter(self.source) if items is None else items
                chunk = list(islice(items, DRAWN_AT_ONCE))
            yield from chunk
            if len(chunk) < DRAWN_AT_ONCE:
                return

    def _seeded(self, share: Iterator[Any]) -> Iterator[Any]:
        for place, item in enumerate(share, start=self.start_batch):
            seed = derive_seed(self.seed, self.epoch, place, self.rank)
            yield SeededBatch(item, seed) if self.batched else SeededIndex(item, seed)

    def _share(self) -> Iterator[Any]:
        if self.world_size == 1:
            return self._drawn()
        if self.mode in ("evaluate", "ghost"):
            return self._every_nth()
        return (batches[self.rank] for batches in self._rounds())

    def _every_nth(self) -> Iterator[Any]:
        first, count = None, 0
        for count, batch in enumerate(self._drawn(), start=1):
            first = batch if count == 1 else first
            if (count - 1) % self.world_size == self.rank:
                yield batch
        left = count % self.world_size
        if self.mode == "ghost" and left and self.rank >= left:
            yield first

    def _rounds(self) -> Iterator[Sequence[Any]]:
        """Yield one batch for each rank at a time; the last round is held back until it is known to be the last."""
        stream, ranks = self._drawn(), self.world_size
        held = list(islice(stream, ranks))
        while len(held) == ranks:
            following = list(islice(stream, ranks))
            if not following:
                break
            yield held
            held = following
        if held and not (len(held) < ranks and self._drops_short_round):
            yield self._last_round(held)

    def _last_round(self, batches: list[Any]) -> list[Any]:
        ranks = self.world_size
        if len(batches) == ranks and (not self.batched or len({len(batch) for batch in batches}) == 1):
            return batches
        samples = [index for batch in batches for index in batch] if self.batched else batches
        size, larger = divmod(len(samples), ranks)
        self.real_sizes = [size + (rank < larger) for rank in range(ranks)]
        starts = [sum(self.real_sizes[:rank]) for rank in range(ranks)]
        parts = [samples[start : start + real] for start, real in zip(starts, self.real_sizes, strict=True)]
        # A rank without a sample of its own works on the first one again, which weighs nothing.
        least = max(self.real_sizes) if self.mode == "even" else 1
        parts = [part + samples[: max(0, least - len(part))] for part in parts]
        return parts if self.batched else [part[0] for part in parts]

    @property
    def _drops_short_round(self) -> bool:
        return self.mode == "train" and self.batched and getattr(self.source, "drop_last", False) is True

    def _refuse_what_cannot_be_shared(self) -> None:
        """Refuse data that cannot be shared out (ValueError), before the first step."""
        if self.world_size == 1 or self.mode in ("evaluate", "ghost"):
            return
        try:
            count = len(self.source)
        except TypeError:
            return
        if self.mode == "even" and not self.batched and count % self.world_size:
            raise ValueError(
                f"the loader has batch_size=None and {count} items, which {self.world_size} ranks cannot share evenly; "
                "pass a loader with a batch_size, so that the last round can be split, or a number of items that "
                f"{self.world_size} divides."
            )
        if 0 < count < self.world_size and self._drops_short_round:
            raise ValueError(
                f"the training data has {count} batches for {self.world_size} ranks, and drop_last drops a short round; "
                "use fewer devices, a smaller batch_size, more data, or drop_last=False."
            )


def _is_stock(source: Any, kind: type) -> bool:
    """Return whether a sampler is torch's own of a kind, or torch's own batch sampler around one."""
    return type(source) is kind or (type(source) is BatchSampler and type(source.sampler) is kind)


def _with_own_generators(source: Any) -> tuple[Any, list[tuple[torch.Generator, int]]]:
    """Return the sampler with copies of the generators that the user gave it, and each copy with its first seed.

    A generator object that the user made goes on from epoch to epoch; a copy, seeded anew each epoch, makes the order a
    function of the epoch and leaves the user's own object alone.
    """
    generators: list[tuple[torch.Generator, int]] = []

    def own(sampler: Any) -> Any:
        generator = getattr(sampler, "generator", None)
        inner = getattr(sampler, "sampler", None)
        if not isinstance(generator, torch.Generator) and inner is None:
            return sampler
        sampler = copy.copy(sampler)
        if isinstance(generator, torch.Generator):
            sampler.generator = torch.Generator()
            generators.append((sampler.generator, generator.initial_seed()))
        if inner is not None:
            sampler.sampler = own(inner)
        return sampler

    return own(source), generators
