"""Combined: several loaders at once, batch beside batch or one after the other.

`CombinedLoader` (combined_loader.py) is what a user makes; `ShardedCombination` is one rank's share of it, as the loops run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import accumulate, islice
from typing import Any

from trainwright.data.batch_stream import END
from trainwright.data.collection import is_collection
from trainwright.data.combined_loader import Combination, combined_length
from trainwright.data.combined_loader import CombinedLoader as CombinedLoader
from trainwright.data.loaders import ShardedLoader
from trainwright.data.seeding import derive_seed
from trainwright.data.share import Mode, Place
from trainwright.data.source_state import SourceState


class ShardedCombination:
    """One rank's share of a CombinedLoader; iterating yields the combined batches, under "sequential" those of one loader.

    The first loader has the order that it would have alone, each other one an order of its own, and each further pass of a
    shorter loader again another; all of them are functions of (seed, epoch), and begin at any batch.

    In an evaluation batch number i of every loader goes to the same rank, so that the ranks together have the combined
    batches that one process would have. In training each loader's last round is re-split among the ranks by itself.

    Args:
        loader: the loaders and how they are combined.
        rank, world_size: whose share.
        mode: "train", "evaluate", "ghost" or "even" (see share.py).
        options: `shard`, `in_order` and `pin_memory`, as of ShardedLoader.

    Raises:
        TypeError: a loader that several ranks cannot share, or (in "ghost" mode) whose length is not known.
        ValueError: loaders that cannot be combined so, or cannot be shared out over this many ranks.
    """

    def __init__(self, loader: CombinedLoader, *, rank: int, world_size: int, mode: Mode, **options: bool) -> None:
        self.loader = loader
        self.rank, self.world_size, self.mode = rank, world_size, mode
        self.combination = loader.mode
        self.epoch = 0
        self.start_batch = 0
        self._options = options
        self._has_ghosts = mode == "ghost" and world_size > 1
        part_mode: Mode = "evaluate" if self._has_ghosts else mode
        for name, leaf in zip(loader.names, loader.flattened, strict=True):
            if isinstance(leaf, Iterator):
                raise TypeError(
                    f"the collection's {name or 'loader'} is a {type(leaf).__name__}, which can be read only once; pass a "
                    "list, a DataLoader, or an object whose __iter__ begins anew."
                )
        self.parts = [
            ShardedLoader(each, rank=rank, world_size=world_size, mode=part_mode, **options)
            for each in loader.flattened
        ]
        """This rank's share of each loader, in the order of `loader.flattened`."""
        self._seed = 0
        self._weights: dict[int, float] = {}
        """The weights of the rounds that were reached of those that end a loader ("sequential" only), by batch number."""
        self._sizes: list[list[int] | None] = []
        """The `last_sizes` of the loaders that gave the batch at hand."""
        self._places: list[Place] = []
        """Where each loader begins; empty where the start says it."""
        self._first_batches: list[int] = []
        """The number of each loader's first batch ("sequential" only), of those whose turn has come."""
        self._refuse_what_cannot_be_combined()
        if self.combination == "max_size_cycle":
            for part in self.parts:
                part.share.cycles = True
        if any(part.exact_length is None for part in self.parts):
            for part in self.parts:
                part.is_read_ahead = True

    def set_epoch(
        self,
        seed: int,
        epoch: int,
        start_batch: int = 0,
        places: Sequence[Place] = (),
        states: Sequence[SourceState | None] = (),
    ) -> None:
        """Choose the order of the next `iter`, a function of seed and epoch, and the batch that it starts with.

        `places` and `states`, one a loader, are those of ShardedLoader.

        Raises:
            ValueError: places of another number of loaders.
        """
        if places and len(places) != len(self.parts):
            raise ValueError(
                f"the place in the data is one of {len(places)} loaders, but there are {len(self.parts)} now; go on with the "
                "loaders that it was saved with, or from a checkpoint of an epoch's end."
            )
        self._seed, self.epoch, self.start_batch = seed, epoch, start_batch
        self._sizes, self._places, self._first_batches = [], list(places), []
        self._weights.clear()
        is_sequential = self.combination == "sequential"
        for index, part in enumerate(self.parts):
            start = 0 if is_sequential else start_batch  # without a place it is set anew when its turn comes
            if places:
                state = states[index] if states else None
                part.set_epoch(self._seed_of(index), epoch, places[index]["batch"], [places[index]], [state])
            else:
                part.set_epoch(self._seed_of(index), epoch, start)
            part.share.most = None
        if is_sequential:
            return
        end = self._combined([part.exact_length for part in self.parts])
        for part in self.parts:
            if end is not None and (part.share.cycles or part.exact_length != end):
                part.share.most = end  # so that no worker reads on

    def read_ahead(self) -> None:
        """Expect that a batch is read before the one before it is done."""
        for part in self.parts:
            part.read_ahead()

    def places(self, batch: int) -> list[Place]:
        """Return where each loader stands after so many batches of this rank in the epoch."""
        return [self._place_of(index, batch) for index in range(len(self.parts))]

    def _place_of(self, index: int, batch: int) -> Place:
        share, begun = self.parts[index].share, self._first_batches
        if self.combination != "sequential":
            return share.place(batch)
        if index + 1 < len(begun) and begun[index + 1] <= batch:
            had = begun[index + 1] - begun[index]
            size, order = share.item_size, share.order
            return {"batch": had, "passes": 1, "items": 0, "size": size, "order": order, "digest": 0}
        if index < len(begun) and begun[index] <= batch:  # else it was only read ahead
            return share.place(batch - begun[index])
        return share.place(share.start_batch)

    def states(self, batch: int) -> list[SourceState | None]:
        """Return the state of each loader's source there; None for one that has none."""
        return [part.state_at(place) for part, place in zip(self.parts, self.places(batch), strict=True)]

    @property
    def starts_beyond(self) -> bool:
        """Return whether the start lies beyond the end of a loader."""
        return any(part.starts_beyond for part in self.parts)

    def close(self) -> None:
        """End the workers that still run."""
        for part in self.parts:
            part.close()

    def _seed_of(self, index: int) -> int:
        return self._seed if index == 0 else derive_seed(self._seed, index)

    def __iter__(self) -> Iterator[Any]:
        batches = self._one_after_another() if self.combination == "sequential" else self._side_by_side()
        return self._with_ghost(batches) if self._has_ghosts else batches

    def _one_after_another(self) -> Iterator[Any]:
        left, place, ends = self.start_batch, self.start_batch - 1, self._known_ends()
        begun = 0
        for index, part in enumerate(self.parts):
            self._first_batches.append(begun)
            start = self._turn(index, left)
            left -= start
            if part.share.start_pass or start == part.exact_length:
                begun += start
                continue
            batches = iter(part)
            # Without a certain length it shows only by reading how many batches stand before the start.
            read = sum(1 for _ in islice(batches, left))
            left -= read
            for batch in batches:
                self._note([part])
                if (place := place + 1) in ends:
                    self._weights[place] = self.last_weight
                yield batch
            begun = place + 1 - left
            if not ends and self.world_size > 1:  # the batch was its last, and is held back until the next one is read
                self._weights[place] = self.last_weight

    def _turn(self, index: int, left: int) -> int:
        """Begin a loader whose turn has come; return how many of the batches `left` before the start are jumped over in it."""
        part = self.parts[index]
        if self._places:
            return part.start_batch
        length = part.exact_length
        start = min(left, length) if length is not None else 0
        part.set_epoch(self._seed_of(index), self.epoch, start)
        return start

    def _side_by_side(self) -> Iterator[Any]:
        iterators = [self._begun(part) for part in self.parts]
        is_cycle = self.combination == "max_size_cycle"
        place = self.start_batch
        while True:
            batches = []
            for index, iterator in enumerate(iterators):
                batch = next(iterator, END)
                if batch is END:
                    if self.combination == "min_size" or is_cycle:
                        return
                    iterators[index] = iter(())  # lets go of its workers
                batches.append(batch)
            there = [part for part, batch in zip(self.parts, batches, strict=True) if batch is not END]
            if not there or (is_cycle and not any(_is_in_first_pass(part, place) for part in self.parts)):
                return
            if len(there) < len(batches):
                batches = [None if batch is END else batch for batch in batches]
            self._note(there)
            yield self.loader.rebuilt(batches)
            place += 1

    def _begun(self, part: ShardedLoader) -> Iterator[Any]:
        length = part.exact_length
        is_over = length is not None and self.start_batch >= length and not part.share.cycles
        return iter(()) if is_over else iter(part)

    def _note(self, there: list[ShardedLoader]) -> None:
        """Keep what the last round is weighed by, as long as it is that of the batch at hand."""
        if self.world_size > 1:
            self._sizes = [part.last_sizes for part in there]

    def _with_ghost(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, then the first one again where other ranks have one more."""
        real, length = self.real_length, self.length
        assert real is not None
        assert length is not None
        first = END
        for batch in batches:
            if first is END and real < length:
                first = batch
            yield batch
        if real == length:
            return
        if first is END:
            others = ShardedCombination(
                self.loader, rank=0, world_size=self.world_size, mode="evaluate", **self._options
            )
            others.set_epoch(self._seed, self.epoch)
            first = next(iter(others))
        yield first

    def _combined(self, lengths: list[int | None]) -> int | None:
        known = [length for length in lengths if length is not None]
        return combined_length(known, self.combination) if len(known) == len(lengths) else None

    @property
    def length(self) -> int | None:
        """Return how many batches this rank has in a whole epoch; None where a loader has no length."""
        if self._has_ghosts:
            return self._combined([part.share.rounds(part.share.source_length or 0, rank=0) for part in self.parts])
        return self._combined([part.length for part in self.parts])

    @property
    def whole_length(self) -> int | None:
        """Return the length of an epoch that is shared out at this world size from its start."""
        return self._combined([part.whole_length for part in self.parts])

    @property
    def exact_length(self) -> int | None:
        """Return the length where it is certain."""
        return self.length if all(part.exact_length is not None for part in self.parts) else None

    @property
    def real_length(self) -> int | None:
        """Return how many of this rank's batches count in an evaluation; None where all that come do."""
        return self._combined([part.length for part in self.parts]) if self._has_ghosts else None

    def __len__(self) -> int:
        length = self.length
        if length is None:
            raise TypeError("a loader of this collection has no length, so the collection has none.")
        return length

    @property
    def last_sizes(self) -> list[int] | None:
        """Return, per rank, how many samples of the last round are no repeats; None where all are, or loaders differ."""
        sizes = self._sizes[0] if self._sizes else None
        return sizes if all(each == sizes for each in self._sizes) else None

    @property
    def last_weight(self) -> float:
        """Return the factor by which this rank's part in the last round differs from an equal one, if all loaders agree."""
        weights = {_weight(sizes, self.rank) for sizes in self._sizes}
        return weights.pop() if len(weights) == 1 else 1.0

    @property
    def round_ends(self) -> Set[int]:
        """Return the numbers of the batches that end a loader ("sequential" only), of those reached: a live view."""
        return self._weights.keys()

    def _known_ends(self) -> frozenset[int]:
        """Return the numbers of the batches that end a loader before the last one; none where a length is not known."""
        lengths = [part.exact_length for part in self.parts]
        if self.combination != "sequential" or self.world_size == 1 or None in lengths:
            return frozenset()
        ends = list(accumulate(length or 0 for length in lengths))
        return frozenset(end - 1 for end in ends[:-1] if end)

    def weight_at(self, index: int) -> float:
        """Return the factor by which this rank's part differs from an equal one in a round of `round_ends`."""
        return self._weights.get(index, 1.0)

    @property
    def may_read_ahead(self) -> bool:
        """Return whether a batch may be read before the one before it is done, with the same numbers drawn in both."""
        return all(part.may_read_ahead for part in self.parts)

    @property
    def ends_alike(self) -> bool:
        """Return whether every rank sees the end at the same batch, or can know it beforehand from the lengths."""
        return self.exact_length is not None or all(part.ends_alike for part in self.parts)

    def _refuse_what_cannot_be_combined(self) -> None:
        lengths = [part.share.source_length if part.exact_length is not None else None for part in self.parts]
        if self._has_ghosts and (None in lengths or self.combination == "sequential"):
            raise TypeError(
                "this strategy needs every rank in each forward, so loaders that are evaluated together must have lengths; "
                "pass DataLoaders over map-style datasets, or the loaders in a list or dict of their own."
            )
        if self.combination == "max_size_cycle" and 0 in lengths and any(lengths):
            raise ValueError(
                "a loader of this collection has no batch, so max_size_cycle cannot go through it again; give it data, leave "
                "it out, or choose mode='max_size'."
            )


def shard(
    loader: Any,
    *,
    rank: int,
    world_size: int,
    mode: Mode,
    default_combination: Combination = "max_size_cycle",
    **options: bool,
) -> ShardedLoader | ShardedCombination:
    """Return this rank's share of a loader, or of a list, tuple or dict of loaders, combined by default as told.

    A list or tuple that holds no DataLoader is one loader, a list of batches. The options are those of ShardedLoader.
    """
    if not isinstance(loader, CombinedLoader):
        if not is_collection(loader):
            return ShardedLoader(loader, rank=rank, world_size=world_size, mode=mode, **options)
        loader = CombinedLoader(loader, default_combination)
    return ShardedCombination(loader, rank=rank, world_size=world_size, mode=mode, **options)


def evaluation_loaders(
    loader: Any, *, rank: int, world_size: int, mode: Mode, **options: bool
) -> list[tuple[str | None, ShardedLoader | ShardedCombination]]:
    """Return this rank's share of each loader that is evaluated by itself, with its name (the key in a dict).

    A CombinedLoader of another mode than "sequential" is one loader, of combined batches.
    """

    def share_of(each: Any) -> ShardedLoader:
        return ShardedLoader(each, rank=rank, world_size=world_size, mode=mode, **options)

    if is_collection(loader):
        loader = CombinedLoader(loader, "sequential")
    if not isinstance(loader, CombinedLoader):
        return [(None, share_of(loader))]
    if loader.mode == "sequential":
        return [(name, share_of(each)) for name, each in zip(loader.names, loader.flattened, strict=True)]
    return [(None, ShardedCombination(loader, rank=rank, world_size=world_size, mode=mode, **options))]


def _is_in_first_pass(part: ShardedLoader, place: int) -> bool:
    first_pass = part.share.first_pass
    return first_pass is None or place < first_pass


def _weight(sizes: list[int] | None, rank: int) -> float:
    return 1.0 if sizes is None else sizes[rank] * len(sizes) / sum(sizes)
