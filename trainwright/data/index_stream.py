"""The index stream: which samples make up each batch of one rank, from the loader's own sampler.

Every rank walks the whole stream of the loader's batch sampler, drawn under a seed of (seed, epoch), and takes its share of
it (share.py). So the order is a pure function of (seed, epoch), it can start at any item, and no sampler is built anew.
A short or uneven last round of training is re-split, sample by sample, where torch's own BatchSampler makes the batches;
those of a batch sampler of the user's own stay whole.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from trainwright.data.order_digest import OrderDigest
from trainwright.data.own_generators import OwnGenerators
from trainwright.data.seeding import SideGenerators, derive_seed
from trainwright.data.share import Mode as Mode
from trainwright.data.share import Place, Share, even_sizes
from trainwright.data.workers import SeededBatch, SeededIndex
from trainwright.rank_zero import rank_zero_warn

DRAWN_AT_ONCE = 256  # batches of torch's own samplers; swapping generators costs about as much as drawing 100 of them


class IndexStream(Share):
    """The batch sampler of one rank, around the loader's own.

    Args:
        source: the loader's batch sampler (lists of indices), or its sampler where the loader makes no batches.
        batched: whether an item of the source is a list of indices.
        rank, world_size: whose share.
        mode: how the shares are cut (see share.py).
        seed_rank: the rank that the batches' seeds are made of, where the share is not cut by it.
        is_alike: whether each rank's source is to draw alike; False where the user has given each rank its own.
    """

    def __init__(
        self,
        source: Any,
        *,
        batched: bool,
        rank: int,
        world_size: int,
        mode: Mode,
        seed_rank: int | None = None,
        is_alike: bool = True,
    ) -> None:
        super().__init__(rank=rank, world_size=world_size, mode=mode)
        self.source = source
        self.batched = batched
        self._is_alike = is_alike
        self._digest = OrderDigest()
        self.seed_rank = rank if seed_rank is None else seed_rank
        self._trimmed = 0
        """Samples that are left out of the batch at the start, since they were consumed."""
        self._taken_up: Place | None = None
        """The place that the start was said by; None for none."""
        self.gives_seeds = False
        """Whether each item carries a seed for the worker that fetches it."""
        self.noted: deque[list[Any]] | None = None
        """Where each iteration that begins from now on notes the indices of the batches that it gives; None for nowhere."""
        self._refuse_what_cannot_be_shared()

    def set_epoch(self, seed: int, epoch: int, start_batch: int = 0, place: Place | None = None) -> None:
        """Choose the order that comes next, and where it starts (see share.py)."""
        self._trimmed, self._taken_up = 0, place
        super().set_epoch(seed, epoch, start_batch, place)
        if self._trimmed and self.is_split:
            self.cuts[start_batch] = []  # its first round has fewer samples than a full one
        wanted = 0
        if place is not None and place["size"] == self.item_size and not self.is_of_another_order(place):
            wanted = place.get("digest", 0)
        self._digest.begin(self.start_pass, self.start_item, wanted)

    def __iter__(self) -> Iterator[Any]:
        share = self.items() if self.noted is None else self._noting(self.items(), self.noted)
        return self._seeded(share) if self.gives_seeds else share

    def __len__(self) -> int:
        """Return how many batches this rank has in an epoch; TypeError where the source has no length."""
        length = self._length_of(len(self.source))
        assert length is not None
        return length

    @property
    def order(self) -> str:
        sampler = getattr(self.source, "sampler", self.source)
        try:
            return f"{type(sampler).__name__} of {len(sampler)} samples"
        except (TypeError, NotImplementedError):
            return type(sampler).__name__

    @property
    def source_length(self) -> int | None:
        """Return how many items a pass has, over all ranks; None where the sampler has no length."""
        try:
            return len(self.source)
        except (TypeError, NotImplementedError):
            return None

    @property
    def drops_short_round(self) -> bool:
        """Return whether a last round with fewer batches than ranks is left out, as a short batch is."""
        return self.mode == "train" and self.batched and getattr(self.source, "drop_last", False) is True

    @property
    def item_size(self) -> int:
        """Return the batch size, where torch's own batch sampler makes the batches; 1 where there are none."""
        if not self.batched:
            return 1
        return int(self.source.batch_size) if type(self.source) is BatchSampler else 0

    def fitted(self, place: Place) -> tuple[int, int]:
        """Return the pass and the item that a place stands for; where the batch size has changed, by its samples.

        Within a batch of the new size only what is left of it comes.
        """
        size, was = self.item_size, place["size"]
        if not size or not was or size == was:
            return super().fitted(place)
        samples, items = place["items"] * was, self.source_length
        sampler = self.source.sampler if self.batched else self.source
        if items is not None and samples >= len(sampler):
            return place["passes"], items
        whole, self._trimmed = divmod(samples, size)
        return place["passes"], whole

    def place(self, batch: int) -> Place:
        if self._trimmed and self._taken_up is not None and batch == self.start_batch:
            return self._taken_up  # in batches of the new size it lies within one
        return super().place(batch)

    def drawn(self, pass_number: int, start: int = 0) -> Iterator[Any]:
        """Yield the items of one pass over the whole stream from one of them on."""
        items = islice(self._drawn_whole(pass_number), start, None)
        if not self._trimmed or pass_number != self.start_pass:
            return items
        return chain((item[self._trimmed :] for item in islice(items, 1)), items)

    def _drawn_whole(self, pass_number: int) -> Iterator[Any]:
        """Yield the items of one pass over the whole stream, drawn in chunks under its seed."""
        if _is_stock(self.source, SequentialSampler):
            yield from self.source
            return
        seed = self.pass_seed(pass_number)
        side = SideGenerators(derive_seed(seed, self.epoch))
        own = OwnGenerators(self.source, seed, self.epoch, is_alike=self._is_alike)
        if _is_stock(self.source, RandomSampler):
            stock = iter(self.source)
            with side.drawn(), own.drawn():
                first = list(islice(stock, 1))  # it takes its generator here, or draws the seed of one
            yield from first
            yield from stock
            return
        self._digest.begin_pass(pass_number)
        # What is left behind is drawn at once. From there on a sampler of the user's is asked for one batch at a time, as it
        # may follow the training (hard examples, a curriculum); torch's own cannot.
        behind = self.start_item if pass_number == self.start_pass else 0
        most = DRAWN_AT_ONCE if _is_torchs(self.source) else 1
        items: Iterator[Any] | None = None
        while True:
            size, behind = max(behind, most), 0
            with side.drawn(), own.drawn():
                items = iter(self.source) if items is None else items
                chunk = list(islice(items, size))
            if self._digest.add(pass_number, chunk if self.batched else [[each] for each in chunk]):
                self._warn_of_other_items()
            yield from chunk
            if len(chunk) < size:
                return

    def digest(self, passes: int, items: int) -> int:
        """Return the digest of the first items of a pass; 0 where torch's own samplers draw them, or they are no plain data."""
        return self._digest.at(passes, items)

    def _warn_of_other_items(self) -> None:
        rank_zero_warn(
            f"the run was saved within an epoch of a {self.order} that has drawn another order now than it drew then: of the "
            "rest of this epoch samples may come twice or not at all. Draw the order, in its __iter__, from a generator that "
            "it has as an attribute or from torch's global one, which are seeded for each epoch, or go on from a checkpoint "
            "of an epoch's end.",
            stacklevel=2,
        )

    def batch_seed(self, number: int) -> int:
        """Return the seed of what is drawn for a batch of this rank: of its samples, not of which they are."""
        return derive_seed(self.seed, self.epoch, number, self.seed_rank)

    @property
    def is_split(self) -> bool:
        """Return whether a round's batches may be cut anew: not those that the user's own batch sampler has made."""
        return self.batched and type(self.source) is BatchSampler

    def cut_round(self, items: list[Any], number: int) -> Any:
        """Return this rank's part of a round, re-split where its batches may be; another's where it has none."""
        ranks = self.world_size
        if not self.is_split:
            sizes = [len(item) if self.batched else 1 for item in items] + [0] * (ranks - len(items))
            self._note_sizes(sizes, number)
            return items[self.rank] if self.rank < len(items) else items[0]
        samples = [index for batch in items for index in batch]
        most = max(len(batch) for batch in items)
        sizes = self.cuts.get(number) or even_sizes(len(samples), ranks, most)
        self._note_sizes(sizes, number)
        start, own = sum(sizes[: self.rank]), sizes[self.rank]
        if own:
            return samples[start : start + own]
        part = samples[: sizes[0]]  # the first rank's, which weighs nothing here
        return part * 2 if len(part) == 1 < self.source.batch_size and number not in self.cuts else part

    def _note_sizes(self, sizes: list[int], number: int) -> None:
        if len(set(sizes)) > 1:
            self.uneven[number] = sizes

    def short_rounds(self, end: int) -> dict[int, int] | None:
        """Return how many samples the rounds before batch number `end` have that are no full ones; None where unknown."""
        items = self.source_length
        if not self.is_split or self._trimmed or items is None:
            return None
        size, ranks, found = int(self.source.batch_size), self.world_size, {}
        samples = items * size if self.source.drop_last else len(self.source.sampler)
        number, start = self._base, self.start_item
        while number < end and items:
            rounds = self.rounds(max(0, items - start))
            left = samples - size * (start + (rounds - 1) * ranks)
            if rounds and left < size * ranks:
                found[number + rounds - 1] = left
            if not self.cycles:
                break
            number, start = number + rounds, 0
        return found

    def _noting(self, share: Iterator[Any], noted: deque[list[Any]]) -> Iterator[Any]:
        for item in share:
            noted.append(list(item) if self.batched else [item])
            yield item

    def _seeded(self, share: Iterator[Any]) -> Iterator[Any]:
        for place, item in enumerate(share, start=self.start_batch):
            seed = self.batch_seed(place)
            yield SeededBatch(item, seed, self.epoch) if self.batched else SeededIndex(item, seed, self.epoch)

    def _refuse_what_cannot_be_shared(self) -> None:
        """Refuse data that cannot be shared out (ValueError), before the first step."""
        count = self.source_length
        if self.world_size == 1 or self.mode in ("evaluate", "ghost") or count is None:
            return
        if 0 < count < self.world_size and self.drops_short_round:
            raise ValueError(
                f"the data has {count} batches for {self.world_size} ranks, and drop_last drops a short round; "
                "use fewer devices, a smaller batch_size, more data, or drop_last=False."
            )


def _is_stock(source: Any, kind: type) -> bool:
    """Return whether a sampler is torch's own of a kind, or torch's own batch sampler around one."""
    return type(source) is kind or (type(source) is BatchSampler and type(source.sampler) is kind)


def _is_torchs(source: Any) -> bool:
    """Return whether torch itself defines a sampler, and the one within a batch sampler."""
    parts = [source, source.sampler] if type(source) is BatchSampler else [source]
    return all(type(each).__module__.startswith("torch.utils.data.") for each in parts)


def in_dataset_order(source: Any) -> tuple[Any, bool]:
    """Return a sampler with the shuffling of a stock one taken out, and whether its order is the user's own still."""
    batches = type(source) is BatchSampler
    sampler = source.sampler if batches else source
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        sampler = SequentialSampler(sampler.data_source)
        if batches:
            source = copy.copy(source)
            source.sampler = sampler
        return (source if batches else sampler), False
    is_in_order = (
        isinstance(sampler, (SequentialSampler, list, tuple, range)) or getattr(sampler, "shuffle", None) is False
    )
    return source, not is_in_order
