"""Stream shard: one rank's part of a stream of items, lists of indices (index_stream.py) or batches (batch_stream.py).

Every rank walks the whole stream and takes every N-th item, so the ranks exchange nothing.

    train      Items 0 .. N-1 are a round, and rank r takes the r-th. So all ranks make the same number of steps. In a
               short or uneven last round the ranks are weighted by their samples (`uneven`). A rank without samples works
               on another rank's samples with weight zero. With drop_last a short round is dropped.
    evaluate   Rank r takes the items r, r + N, r + 2N and so on. Nothing is padded, so every sample counts once.
    padded     Like evaluate, but a rank without an item in the last round gets the first item again. This dummy batch
               takes part in the collectives. `real_length` excludes it from the results.

In a combination of loaders a shorter stream `cycles`: it yields pass after pass, in different orders. In training every
pass is sharded separately. In an evaluation the passes are one long stream, as on one process.

A `StreamPosition` is the part of the stream that all ranks together consumed. A shard that begins there divides the rest
over the present ranks, so every item comes once at any world size. Its batch numbers continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any, Literal, TypedDict

from trainwright.data.seeding import derive_seed
from trainwright.rank_zero import rank_zero_warn

Mode = Literal["train", "evaluate", "padded"]


class StreamPosition(TypedDict):
    """The consumed part of a stream, as plain data."""

    batch: int
    """Batches per rank in the epoch so far, at any world sizes."""
    passes: int
    """Completed passes over the source."""
    items: int
    """Items of the current pass that all ranks consumed."""
    size: int
    """Samples in an item, or 0 if the number varies."""
    order: str
    """A description of the sampler, or empty if unknown. Missing in older checkpoints."""


class Slices(Sequence[Any]):
    """The batches of torch's BatchSampler, each made when it is read, so that a rank makes only its own."""

    def __init__(self, samples: Sequence[int], size: int, drop_last: bool, start: int) -> None:
        stop = len(samples) // size * size if drop_last else len(samples)
        self._samples, self._size = samples, size
        self._starts = range(start * size, stop, size)
        """The first sample of every batch."""

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: Any) -> Any:
        start = self._starts[number]
        return list(self._samples[start : start + self._size])


class StreamShard:
    """One rank's shard. A subclass defines how to draw a pass over the source and how to split a last round.

    If it `cycles`, another pass begins whenever the source ends.
    """

    def __init__(self, source: Any, *, rank: int, world_size: int, mode: Mode, cycles: bool) -> None:
        self.source = source
        self.rank, self.world_size, self.mode = rank, world_size, mode
        self.evaluates = mode != "train"
        """Whether the shard belongs to an evaluation, which has no rounds."""
        self.seed = self.epoch = self.start_batch = 0
        self.cycles = cycles
        self._most: int | None = None
        self.uneven: dict[int, list[int]] = {}
        """Samples per rank of the uneven rounds drawn so far, by batch number."""
        self.cuts: dict[int, list[int]] = {}
        """Samples per rank of rounds that are split in a special way, by batch number."""
        self.start_pass = self.start_item = 0
        """The pass and its item, over all ranks, where the shard starts."""
        self.starts_beyond = False
        """Whether the start lies beyond the end of the source."""
        self._unread = 0
        """Batches before the start that must be read in order to skip them."""
        self._first_pass: int | None = None
        self._first_items: int | None = None
        self._dummy_at: int | None = None
        self._begun = [(0, 0, 0)]
        """The starts of the passes: this rank's batch number, the pass, and its item."""

    def set_epoch(self, seed: int, epoch: int, start_batch: int = 0, position: StreamPosition | None = None) -> None:
        """Choose the order of the next pass, and this rank's first batch.

        The stream begins at `position`, or after `start_batch` batches at this world size.
        """
        self.seed, self.epoch, self.start_batch = seed, epoch, start_batch
        self._first_pass = self._first_items = self._dummy_at = None
        self._unread = 0
        self.uneven.clear()
        self.cuts.clear()
        self.start_pass, self.start_item = self._cut(start_batch) if position is None else self.fitted(position)
        self._begun = [(self._base, self.start_pass, self.start_item)]
        if self.start_pass:
            self._first_pass = start_batch
        exact = self.exact_source_length
        # Counted in batches of this world size, the last round may reach beyond the end by all but one item.
        most = None if exact is None or self.cycles else exact + (self.world_size - 1 if position is None else 0)
        self.starts_beyond = most is not None and self.start_item > most
        order_before = position.get("order") if position is not None and position["items"] else None
        if order_before and self.order not in ("", order_before) and not self.starts_beyond:
            rank_zero_warn(
                f"the checkpoint was saved within an epoch of a {order_before}, and the run resumes with a "
                f"{self.order}. In the rest of this epoch samples may come twice or not at all. Resume with the same data "
                "and order, or from a checkpoint at an epoch's end.",
                stacklevel=2,
            )

    def plan_rounds(self, end: int | None, cuts: Mapping[int, list[int]]) -> None:
        """End the epoch before batch number `end`, or at the end of the data if it is None. Split rounds as in `cuts`."""
        self._most = end
        self.cuts.update(cuts)

    def plan_states(self, batches: Sequence[tuple[int, int]]) -> None:
        """Take the source's state after these batches of this rank: pairs of an interval and one such batch."""

    def _cut(self, start_batch: int) -> tuple[int, int]:
        """Return the pass and the item at which a batch begins if the world size never changed."""
        items = start_batch * self.world_size
        if not self.cycles:
            return 0, items
        exact = self.exact_source_length
        if not exact:
            self._unread = start_batch  # without a length, only reading shows the pass of the start
            return 0, 0
        if self.evaluates:
            return divmod(items, exact)  # the passes are one long stream
        passes, batches = divmod(start_batch, self.rounds(exact))
        return passes, batches * self.world_size

    def fitted(self, position: StreamPosition) -> tuple[int, int]:
        """Return the pass and the item of a position, in items of this stream's size."""
        size, was, items = self.item_size, position["size"], position["items"]
        has_changed = bool(size and was and size != was)
        return position["passes"], self.item_at(items * was, was) if has_changed else items

    def item_at(self, samples: int, was: int) -> int:
        """Return the item that begins after this many samples, which were consumed in items of a different size."""
        raise NotImplementedError

    def position(self, batch: int) -> StreamPosition:
        """Return the position after this many batches of this rank in the epoch."""
        begun, passes, items = next(beginning for beginning in reversed(self._begun) if beginning[0] <= batch)
        items, exact = items + (batch - begun) * self.world_size, self.exact_source_length
        items = items if exact is None else min(items, exact)  # the last round may be short
        return {"batch": batch, "passes": passes, "items": items, "size": self.item_size, "order": self.order}

    @property
    def _base(self) -> int:
        """Return the number of the batch at `start_item`."""
        return self.start_batch - self._unread

    @property
    def item_size(self) -> int:
        """Return the samples in an item, or 0 if the number varies."""
        return 0

    @property
    def order(self) -> str:
        """Return the name of the sampler and its number of samples, or an empty text if unknown."""
        return ""

    @property
    def source_length(self) -> int | None:
        """Return the items in a pass, over all ranks, as the source reports them, or None."""
        try:
            return len(self.source)
        except (TypeError, NotImplementedError):
            return None

    @property
    def exact_source_length(self) -> int | None:
        """Return the items in a pass, or None if the source's number is an estimate."""
        return self.source_length

    @property
    def drops_short_round(self) -> bool:
        """Return whether a last round with fewer items than ranks is dropped."""
        return not self.evaluates and getattr(self.source, "drop_last", False) is True

    def drawn(self, pass_number: int, start: int = 0) -> Iterable[Any]:
        """Return the items of all ranks in one pass over the source, from `start` on."""
        raise NotImplementedError

    def cut_round(self, items: list[Any], number: int) -> Any:
        """Return this rank's part of a short, uneven or re-split round. If the parts differ, record them in `uneven`."""
        raise NotImplementedError

    def rounds(self, source_length: int) -> int:
        """Return the batches of this rank in a pass of that many items."""
        if self.mode == "evaluate":
            return self._count(source_length)
        whole, left = divmod(source_length, self.world_size)
        return whole if left == 0 or self.drops_short_round else whole + 1

    @property
    def length(self) -> int | None:
        """Return the batches of this rank in the first pass, also before the start, or None if unknown."""
        return self._length_of(self.source_length)

    @property
    def whole_length(self) -> int | None:
        """Return the batches of this rank in a pass that runs from its start at this world size."""
        items = self.source_length
        return None if items is None else self.rounds(items)

    def _length_of(self, items: int | None) -> int | None:
        if items is None:
            return None
        return self.start_batch if self.start_pass else self._base + self.rounds(max(0, items - self.start_item))

    @property
    def real_length(self) -> int | None:
        """Return how many of this rank's batches count in an evaluation, or None while all of them count."""
        items = self.source_length
        return self._dummy_at if items is None else self._count(items)

    @property
    def first_pass(self) -> int | None:
        """Return the batches of this rank in the first pass, or None while they are unknown."""
        exact = self.exact_source_length
        return self._first_pass if exact is None else self._length_of(exact)

    @property
    def real_first_pass(self) -> int | None:
        """Return how many of this rank's batches in the first pass count in an evaluation, or None while unknown."""
        exact = self.exact_source_length
        items = self._first_items if exact is None else exact
        return None if items is None else self._count(items)

    def _count(self, items: int) -> int:
        """Return how many of the first `items` items belong to this rank."""
        return (items - self.rank + self.world_size - 1) // self.world_size

    def pass_seed(self, pass_number: int) -> int:
        """Return the seed of a pass. The first pass uses the seed of the epoch."""
        return self.seed if pass_number == 0 else derive_seed(self.seed, pass_number, 0)

    def items(self) -> Iterator[Any]:
        """Yield this rank's items, from `start_batch` on."""
        if not self.cycles:
            items = self._of_this_rank(self.drawn(0, self.start_item), self._base)
        elif self.evaluates:
            items = self._of_this_rank(self._passes(lambda items, number: items), self._base)
        else:
            items = self._passes(self._of_this_rank)
        left = None if self._most is None else max(0, self._most - self.start_batch)
        return islice(items, self._unread, None if left is None else self._unread + left)

    def _of_this_rank(self, items: Iterable[Any], number: int) -> Iterator[Any]:
        if self.world_size == 1:
            return iter(items)
        return self._every_nth(items) if self.evaluates else self._rounds(items, number)

    def _passes(self, cut: Callable[[Iterable[Any], int], Iterable[Any]]) -> Iterator[Any]:
        number = self._base
        del self._begun[1:]
        for pass_number in count(self.start_pass):
            start = self.start_item if pass_number == self.start_pass else 0
            self._begun.append((number, pass_number, start))
            drawn, items = 0, cut(self.drawn(pass_number, start), number)
            # If the length is unknown, only a pass that is over shows how many batches it had.
            for drawn, item in enumerate(items, start=1):  # noqa: B007 - read after the loop
                yield item
            if drawn == 0 and start == 0:
                raise RuntimeError("an empty loader cannot be cycled to match a longer loader. Add data, or remove it.")
            number += drawn
            if pass_number == 0 and self.evaluates:
                self._first_items, self._first_pass = start + drawn, self.rounds(start + drawn)
            elif pass_number == 0:
                self._first_pass = self._base + drawn

    def _every_nth(self, items: Iterable[Any]) -> Iterator[Any]:
        first, number = None, 0
        if isinstance(items, Slices):
            number, first = len(items), items[0] if len(items) else None
            yield from (items[index] for index in range(self.rank, number, self.world_size))
        else:
            for number, item in enumerate(items, start=1):
                if number == 1 and self.mode == "padded":
                    first = item  # the dummy batch for ranks without an item in the last round
                if (number - 1) % self.world_size == self.rank:
                    yield item
        if self.mode == "padded" and 0 < number % self.world_size <= self.rank:
            self._dummy_at = number // self.world_size
            yield first

    def _rounds(self, items: Iterable[Any], number: int) -> Iterator[Any]:
        """Yield this rank's items of the rounds. A round waits until the next begins, since the last is split differently."""
        ranks = self.world_size
        if isinstance(items, Slices):
            whole = max(0, len(items) - 1) // ranks * ranks
            for start in range(0, whole, ranks):
                if number in self.cuts:
                    yield self.cut_round([items[start + rank] for rank in range(ranks)], number)
                else:
                    yield items[start + self.rank]
                number += 1
            items = [items[index] for index in range(whole, len(items))]
        items = iter(items)
        current = list(islice(items, ranks))
        while len(current) == ranks and (following := list(islice(items, 1))):
            yield self.cut_round(current, number) if number in self.cuts else current[self.rank]
            current = [*following, *islice(items, ranks - 1)]
            number += 1
        if current and not (len(current) < ranks and self.drops_short_round):
            yield self.cut_round(current, number)


def even_sizes(samples: int, ranks: int, most: int, least: int = 2) -> list[int]:
    """Return the samples of a round per rank, as even as possible and over as many ranks as possible.

    A rank gets at most `most` samples, a full batch. It gets at least `least` samples if there are enough, because a step
    may need two samples (batch norm, a loss of pairs). So some ranks may get no sample.
    """
    working = min(ranks, max(-(-samples // most), samples // least, 1))
    size, larger = divmod(samples, working)
    return [size + (rank < larger) if rank < working else 0 for rank in range(ranks)]
