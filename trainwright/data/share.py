"""Share: one rank's part of a stream of items, be they the indices of a batch (index_stream.py) or batches (batch_stream.py).

Every rank goes through the whole stream and takes every N-th item of it, so nobody has to tell the others anything.

    train      items 0 .. N-1 make a round, rank r takes the r-th, so that each rank makes the same number of steps; the last
               round, where it is short or uneven, weighs by its samples (`last_weight`), and a rank that is left without
               one works on another's with no weight. With drop_last a short round is dropped
    evaluate   rank r takes items r, r + N, r + 2N ...; nothing is padded, so each sample counts once
    ghost      as evaluate, but a rank without an item in the last round runs the first one again, for the collectives in
               it; `real_length` tells that its results do not count
    even       as train, but the last round is padded to equal batches with samples that `real_sizes` tells apart

In a combination of loaders a shorter stream `cycles`: pass after pass, each in an order of its own. In training the passes
are shared out one by one; in an evaluation they are one long stream, as they are on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from typing import Any, Literal

from trainwright.data.seeding import derive_seed

Mode = Literal["train", "evaluate", "ghost", "even"]


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
        self.real_sizes: list[int] | None = None
        """Per rank, the samples of the last round that are no repeats; None until such a round has been drawn."""
        self._first_pass: int | None = None
        self._ghost_at: int | None = None

    def set_epoch(self, seed: int, epoch: int, start_batch: int = 0) -> None:
        """Choose the order that comes next, and the batch of this rank that it starts with."""
        self.seed, self.epoch, self.start_batch = seed, epoch, start_batch
        self.real_sizes = self._first_pass = self._ghost_at = None

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

    def drawn(self, pass_number: int) -> Iterator[Any]:
        """Yield the items of one pass over the source, for all ranks."""
        raise NotImplementedError

    def last_round(self, items: list[Any]) -> Any:
        """Return this rank's part of a pass's last round, and note `real_sizes` where the parts are uneven."""
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
        """Return how many batches this rank has in a pass, from its start; None where that is unknown."""
        items = self.source_length
        return None if items is None else self.rounds(items)

    @property
    def real_length(self) -> int | None:
        """Return how many batches of an evaluation count on this rank; None while all that have come do."""
        items = self.source_length
        return self._ghost_at if items is None else (items - self.rank + self.world_size - 1) // self.world_size

    @property
    def first_pass(self) -> int | None:
        """Return how many batches this rank has in the first pass; None while that is not known."""
        exact = self.exact_source_length
        return self._first_pass if exact is None else self.rounds(exact)

    @property
    def last_weight(self) -> float:
        """Return this rank's part in the last round's mean, as a factor of the equal part that a rank usually has."""
        if self.real_sizes is None:
            return 1.0
        return self.real_sizes[self.rank] * self.world_size / sum(self.real_sizes)

    def pass_seed(self, pass_number: int) -> int:
        """Return the seed of a pass; the first has that of the epoch."""
        return self.seed if pass_number == 0 else derive_seed(self.seed, pass_number, 0)

    def items(self) -> Iterator[Any]:
        """Yield this rank's items, from `start_batch` on."""
        if self.cycles:
            share, start = self._cycled()
        else:
            share, start = self._share_of(self.drawn(0)), self.start_batch
        return islice(share, start, None if self.most is None else max(start, start + self.most - self.start_batch))

    def _share_of(self, items: Iterator[Any]) -> Iterator[Any]:
        if self.world_size == 1:
            return items
        return self._every_nth(items) if self.mode in ("evaluate", "ghost") else self._rounds(items)

    def _cycled(self) -> tuple[Iterator[Any], int]:
        """Return an endless share, and how many items of it stand before the start; whole passes are jumped over."""
        exact = self.exact_source_length
        if self.mode in ("evaluate", "ghost"):
            place = self.start_batch * self.world_size
            number, start = divmod(place, exact) if exact else (0, place)
            whole = self._passes(number, lambda items: items)
            return self._share_of(islice(whole, start, None)), 0
        length = self.rounds(exact) if exact else 0
        number, start = divmod(self.start_batch, length) if length else (0, self.start_batch)
        return self._passes(number, self._share_of), start

    def _passes(self, number: int, cut: Callable[[Iterator[Any]], Iterator[Any]]) -> Iterator[Any]:
        for each in count(number):
            drawn = 0
            self.real_sizes = None
            for drawn, item in enumerate(cut(self.drawn(each)), start=1):  # noqa: B007 - it is read after the loop
                yield item
            if drawn == 0:
                raise RuntimeError(
                    "a loader gives no batch, so it cannot be gone through again beside a longer one; give it data, or leave "
                    "it out."
                )
            if each == 0:
                is_whole = self.mode in ("evaluate", "ghost")
                self._first_pass = (drawn - self.rank + self.world_size - 1) // self.world_size if is_whole else drawn

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

    def _rounds(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's item of each round; a round is held back until it is known not to be the last."""
        ranks = self.world_size
        held = list(islice(items, ranks))
        while len(held) == ranks:
            following = list(islice(items, 1))
            if not following:
                break
            yield held[self.rank]
            held = list(chain(following, islice(items, ranks - 1)))
        if held and not (len(held) < ranks and self.drops_short_round):
            yield self.last_round(held)
