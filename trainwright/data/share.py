"""Share: one rank's part of a stream of items, be they the indices of a batch (index_stream.py) or batches (batch_stream.py).

Every rank goes through the whole stream and takes every N-th item of it, so nobody has to tell the others anything.

    train      items 0 .. N-1 make a round, rank r takes the r-th, so that each rank makes the same number of steps; the last
               round, where it is short or uneven, weighs by its samples (`uneven`), and a rank that is left without one
               works on another's with no weight. With drop_last a short round is dropped
    evaluate   rank r takes items r, r + N, r + 2N ...; nothing is padded, so each sample counts once
    ghost      as evaluate, but a rank without an item in the last round is given the first one again, for the collectives
               in it; `real_length` tells that its results do not count

In a combination of loaders a shorter stream `cycles`: pass after pass, each in an order of its own. In training the passes
are shared out one by one; in an evaluation they are one long stream, as they are on one process.

Where training stands in a stream is a `Place`: what all ranks together have consumed of it. A share that begins at one is
cut from the rest of the stream, over however many ranks there are now, so each item comes once whatever the world size was.
Its batches go on being numbered from those that a rank had before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from typing import Any, Literal, TypedDict

from trainwright.data.seeding import derive_seed
from trainwright.rank_zero import rank_zero_warn

Mode = Literal["train", "evaluate", "ghost"]


class Place(TypedDict):
    """Where a stream was left, as plain data."""

    batch: int
    """Batches that each rank had of it in the epoch, at whatever world sizes."""
    passes: int
    """Whole passes over the source that lie behind."""
    items: int
    """Items consumed of the pass at hand, over all ranks."""
    size: int
    """Samples in an item; 0 where that is no fixed number."""
    order: str
    """What drew the order, as people are told of it; empty where that does not show."""
    digest: int
    """That of the consumed items of the pass (order_digest.py); 0 where there is none, and older checkpoints lack it."""


class Share:
    """One rank's share; a subclass says what a pass over its source yields, and how a last round is made up.

    Args:
        rank, world_size: whose share.
        mode: how the shares are cut (see the module).
    """

    def __init__(self, *, rank: int, world_size: int, mode: Mode) -> None:
        self.rank, self.world_size, self.mode = rank, world_size, mode
        self.seed = 0
        """With the epoch, the seed of everything that the source draws."""
        self.epoch = 0
        self.start_batch = 0
        self.cycles = False
        """Whether the source is gone through again and again."""
        self.most: int | None = None
        """The number of the batch to stop before; None to go to the end."""
        self.uneven: dict[int, list[int]] = {}
        """By batch number, the samples that each rank has of a round that is not shared evenly, of those drawn so far."""
        self.cuts: dict[int, list[int]] = {}
        """By batch number, how a round is to be cut, where that does not follow from the round itself."""
        self.start_pass = self.start_item = 0
        """Where in the stream the start stands, over all ranks."""
        self.starts_beyond = False
        """Whether the start lies beyond the end of the source."""
        self._unread = 0
        """Batches before the start that can only be read to be left behind."""
        self._first_pass: int | None = None
        self._first_items: int | None = None
        self._ghost_at: int | None = None
        self._begun: list[tuple[int, int, int]] = [(0, 0, 0)]
        """Where each pass began: this rank's batch number, the pass, and the item of it."""

    def set_epoch(self, seed: int, epoch: int, start_batch: int = 0, place: Place | None = None) -> None:
        """Choose the order that comes next, and the batch of this rank that it starts with.

        With a `place` the stream is cut there; without one it is cut as if all batches had been had at this world size.
        """
        self.seed, self.epoch, self.start_batch = seed, epoch, start_batch
        self._first_pass = self._first_items = self._ghost_at = None
        self._unread = 0
        self.uneven.clear()
        self.cuts.clear()
        self.start_pass, self.start_item = self._cut(start_batch) if place is None else self.fitted(place)
        self._begun = [(self._base, self.start_pass, self.start_item)]
        if self.start_pass:
            self._first_pass = start_batch
        exact = self.exact_source_length
        most = None if exact is None or self.cycles else exact + (self.world_size - 1 if place is None else 0)
        self.starts_beyond = most is not None and self.start_item > most
        if place is not None and not self.starts_beyond:
            self._warn_of_another_order(place)

    def _cut(self, start_batch: int) -> tuple[int, int]:
        """Return the pass and the item of it that a batch begins with, at this world size all along."""
        items = start_batch * self.world_size
        if not self.cycles:
            return 0, items
        exact = self.exact_source_length
        if exact and self.mode in ("evaluate", "ghost"):
            return divmod(items, exact)
        if exact:
            passes, batches = divmod(start_batch, self.rounds(exact))
            return passes, batches * self.world_size
        self._unread = start_batch
        return 0, 0

    def is_of_another_order(self, place: Place) -> bool:
        """Return whether something else drew the order that a place stands in, as far as that shows."""
        was = place.get("order", "")  # an older checkpoint does not say it
        return bool(was and self.order and was != self.order and place["items"])

    def _warn_of_another_order(self, place: Place) -> None:
        if self.is_of_another_order(place):
            was = place["order"]
            rank_zero_warn(
                f"the run was saved within an epoch of a {was}, and goes on with a {self.order}: of the rest of this epoch "
                "samples may come twice or not at all. Go on with the data and the order that it was saved with, or from a "
                "checkpoint of an epoch's end.",
                stacklevel=2,
            )

    def fitted(self, place: Place) -> tuple[int, int]:
        """Return the pass and the item that a place stands for."""
        return place["passes"], place["items"]

    def place(self, batch: int) -> Place:
        """Return where the stream stands after so many batches of this rank in the epoch."""
        begun, passes, items = next(each for each in reversed(self._begun) if each[0] <= batch)
        items, exact = items + (batch - begun) * self.world_size, self.exact_source_length
        items = items if exact is None else min(items, exact)
        return {
            "batch": batch,
            "passes": passes,
            "items": items,
            "size": self.item_size,
            "order": self.order,
            "digest": self.digest(passes, items),
        }

    def digest(self, passes: int, items: int) -> int:
        """Return the digest of the first items of a pass; 0 where there is none."""
        return 0

    @property
    def _base(self) -> int:
        """Return the number of the batch at `start_item`."""
        return self.start_batch - self._unread

    @property
    def item_size(self) -> int:
        """Return how many samples an item has; 0 where that is no fixed number."""
        return 0

    @property
    def order(self) -> str:
        """Return what draws the order, and of how many samples; empty where that does not show."""
        return ""

    @property
    def source_length(self) -> int | None:
        """Return how many items a pass has, over all ranks; None where that is unknown."""
        raise NotImplementedError

    @property
    def exact_source_length(self) -> int | None:
        """Return how many items a pass has where that is certain, and no estimate."""
        return self.source_length

    @property
    def drops_short_round(self) -> bool:
        """Return whether a last round with fewer items than ranks is left out."""
        raise NotImplementedError

    def drawn(self, pass_number: int, start: int = 0) -> Iterator[Any]:
        """Yield the items of one pass over the source from one of them on, for all ranks."""
        raise NotImplementedError

    def cut_round(self, items: list[Any], number: int) -> Any:
        """Return this rank's part of a round that is short, uneven, or to be cut anew; note it in `uneven` where it is that."""
        raise NotImplementedError

    def rounds(self, source_length: int, rank: int | None = None) -> int:
        """Return how many batches a rank (this one by default) has of a pass of that many items."""
        ranks, rank = self.world_size, self.rank if rank is None else rank
        if self.mode == "evaluate":
            return (source_length - rank + ranks - 1) // ranks
        whole, left = divmod(source_length, ranks)
        return whole if left == 0 or self.drops_short_round else whole + 1

    @property
    def length(self) -> int | None:
        """Return how many batches this rank has in the first pass, with those before the start; None where unknown."""
        return self._length_of(self.source_length)

    @property
    def whole_length(self) -> int | None:
        """Return how many batches this rank would have in a pass that is shared out at this world size from its start."""
        items = self.source_length
        return None if items is None else self.rounds(items)

    def _length_of(self, items: int | None) -> int | None:
        if items is None:
            return None
        return self.start_batch if self.start_pass else self._base + self.rounds(max(0, items - self.start_item))

    @property
    def real_length(self) -> int | None:
        """Return how many batches of an evaluation count on this rank; None while all that have come do."""
        items = self.source_length
        return self._ghost_at if items is None else (items - self.rank + self.world_size - 1) // self.world_size

    @property
    def first_pass(self) -> int | None:
        """Return how many batches this rank has in the first pass; None while that is not known."""
        exact = self.exact_source_length
        return self._first_pass if exact is None else self._length_of(exact)

    @property
    def real_first_pass(self) -> int | None:
        """Return how many batches of the first pass count on this rank in an evaluation; None while that is not known."""
        exact = self.exact_source_length
        items = self._first_items if exact is None else exact
        return None if items is None else (items - self.rank + self.world_size - 1) // self.world_size

    def pass_seed(self, pass_number: int) -> int:
        """Return the seed of a pass; the first has that of the epoch."""
        return self.seed if pass_number == 0 else derive_seed(self.seed, pass_number, 0)

    def items(self) -> Iterator[Any]:
        """Yield this rank's items, from `start_batch` on."""
        share = self._cycled() if self.cycles else self._share_of(self.drawn(0, self.start_item), self._base)
        left = None if self.most is None else max(0, self.most - self.start_batch)
        return islice(share, self._unread, None if left is None else self._unread + left)

    def _share_of(self, items: Iterator[Any], number: int) -> Iterator[Any]:
        if self.world_size == 1:
            return items
        return self._every_nth(items) if self.mode in ("evaluate", "ghost") else self._rounds(items, number)

    def _cycled(self) -> Iterator[Any]:
        """Return an endless share; whole passes before the start are jumped over."""
        if self.mode in ("evaluate", "ghost"):
            return self._share_of(self._passes(lambda items, number: items), self._base)
        return self._passes(self._share_of)

    def _passes(self, cut: Callable[[Iterator[Any], int], Iterator[Any]]) -> Iterator[Any]:
        number = self._base
        del self._begun[1:]
        for each in count(self.start_pass):
            start = self.start_item if each == self.start_pass else 0
            self._begun.append((number, each, start))
            drawn = 0
            for drawn, item in enumerate(cut(self.drawn(each, start), number), start=1):  # noqa: B007 - read after the loop
                yield item
            if drawn == 0 and start == 0:
                raise RuntimeError(
                    "a loader gives no batch, so it cannot be gone through again beside a longer one; give it data, or leave "
                    "it out."
                )
            number += drawn
            if each == 0 and self.mode in ("evaluate", "ghost"):
                self._first_items = start + drawn
                self._first_pass = self.rounds(start + drawn)
            elif each == 0:
                self._first_pass = self._base + drawn

    def _every_nth(self, items: Iterator[Any]) -> Iterator[Any]:
        first, number = None, 0
        for number, item in enumerate(items, start=1):
            if number == 1 and self.mode == "ghost":
                first = item
            if (number - 1) % self.world_size == self.rank:
                yield item
        left = number % self.world_size
        if self.mode == "ghost" and left and self.rank >= left:
            self._ghost_at = number // self.world_size
            yield first

    def _rounds(self, items: Iterator[Any], number: int) -> Iterator[Any]:
        """Yield this rank's item of each round; a round is held back until it is known not to be the last."""
        ranks, cuts = self.world_size, self.cuts
        held = list(islice(items, ranks))
        while len(held) == ranks:
            following = list(islice(items, 1))
            if not following:
                break
            yield self.cut_round(held, number) if number in cuts else held[self.rank]
            held = list(chain(following, islice(items, ranks - 1)))
            number += 1
        if held and not (len(held) < ranks and self.drops_short_round):
            yield self.cut_round(held, number)


def even_sizes(samples: int, ranks: int, most: int, least: int = 2) -> list[int]:
    """Return how many of a round's samples each rank gets: equally many, or one more, on as many ranks as may be.

    No rank gets more than `most` (a batch, which the ranks together can hold), nor fewer than `least` unless that asks for
    it: a step may need two (a batch norm, a loss of pairs). So some ranks may get none.
    """
    sharing = min(ranks, max(-(-samples // most), samples // least, 1))
    size, larger = divmod(samples, sharing)
    return [size + (rank < larger) if rank < sharing else 0 for rank in range(ranks)]
