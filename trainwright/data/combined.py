"""Combined: several loaders at once, batch beside batch or one after the other.

`CombinedLoader` (combined_loader.py) is what a user makes; `ShardedCombination` is one rank's share of it, as the loops run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from trainwright.data.collection import is_collection
from trainwright.data.combined_loader import Combination, combined_length
from trainwright.data.combined_loader import CombinedLoader as CombinedLoader
from trainwright.data.index_stream import IndexStream
from trainwright.data.loader_state import StatefulLoader
from trainwright.data.loaders import ShardedLoader, weight_of
from trainwright.data.proportions import are_proportional, in_proportion
from trainwright.data.seeding import derive_seed
from trainwright.data.share import Mode, Place
from trainwright.data.source_state import SourceState
from trainwright.data.stated_reader import END
from trainwright.rank_zero import rank_zero_warn


class ShardedCombination(StatefulLoader):
    """One rank's share of a CombinedLoader; iterating yields the combined batches, under "sequential" those of one loader.

    The first loader has the order that it would have alone, each other one an order of its own, and each further pass of a
    shorter loader again another; all of them are functions of (seed, epoch), and begin at any batch.

    In an evaluation batch number i of every loader goes to the same rank, so that the ranks together have the combined
    batches that one process would have. In training a round in which a loader ends is re-split among the ranks, all of its
    loaders in the same proportions (proportions.py).

    Args:
        loader: the loaders and how they are combined.
        rank, world_size: whose share.
        mode: "train", "evaluate" or "ghost" (see share.py).
        options: `shard`, `in_order` and `pin_memory`, as of ShardedLoader.

    Raises:
        TypeError: a loader that several ranks cannot share, or ones that are evaluated one after the other as one.
        ValueError: loaders that cannot be combined so, or cannot be shared out over this many ranks.
    """

    def __init__(self, loader: CombinedLoader, *, rank: int, world_size: int, mode: Mode, **options: bool) -> None:
        super().__init__()
        self.loader = loader
        self.rank, self.world_size, self.mode = rank, world_size, mode
        self.combination = loader.mode
        self.epoch = 0
        self.start_batch = 0
        self.uneven: dict[int, list[int]] = {}
        """By batch number, the samples that each rank has, or shares in their proportion, of a round that is uneven; of the
        rounds reached so far."""
        self._has_ghosts = mode == "ghost" and world_size > 1
        for name, leaf in zip(loader.names, loader.flattened, strict=True):
            if isinstance(leaf, Iterator) and self.combination == "max_size_cycle":
                raise TypeError(
                    f"the collection's {name or 'loader'} is a {type(leaf).__name__}, which can be read only once, but "
                    "max_size_cycle begins shorter loaders anew; pass a list, a DataLoader, or an object whose __iter__ begins "
                    "anew, or choose another mode."
                )
        self.parts = [
            ShardedLoader(each, rank=rank, world_size=world_size, mode=mode, **options) for each in loader.flattened
        ]
        """This rank's share of each loader, in the order of `loader.flattened`."""
        self._seed = 0
        self._left: list[SourceState | None] = []
        """What each loader's source was left at by the epoch before, or stands at in this one."""
        self._ghost_at: int | None = None
        self._has_warned = False
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

    def begin(
        self, seed: int, epoch: int, start_batch: int, places: Sequence[Place], sources: Sequence[SourceState | None]
    ) -> None:
        """Begin an epoch at a position.

        Raises:
            ValueError: the position is one of another number of loaders.
        """
        if places and len(places) != len(self.parts):
            raise ValueError(
                f"the place in the data is one of {len(places)} loaders, but there are {len(self.parts)} now; go on with the "
                "loaders that it was saved with, or from a checkpoint of an epoch's end."
            )
        self._seed, self.epoch, self.start_batch, self._left = seed, epoch, start_batch, list(sources)
        self._places, self._first_batches, self._ghost_at = list(places), [], None
        self.uneven.clear()
        is_sequential = self.combination == "sequential"
        for index, part in enumerate(self.parts):
            start = 0 if is_sequential else start_batch  # without a place it is set anew when its turn comes
            start = places[index]["batch"] if places else start
            part.begin(self._seed_of(index), epoch, start, places[index : index + 1], sources[index : index + 1])
            part.share.most = None
        if is_sequential:
            return
        end = self._combined([part.exact_length for part in self.parts])
        for part in self.parts:
            if end is not None and (part.share.cycles or part.exact_length != end):
                part.share.most = end  # so that no worker reads on
        if end is not None and self.world_size > 1 and self.mode == "train":
            self._plan(end)

    def _plan(self, end: int) -> None:
        """Let the loaders cut the rounds before batch number `end` that are no full ones in the same proportions."""
        streams = [part.stream for part in self.parts if part.stream is not None and part.is_shared]
        if len(streams) < len(self.parts):
            return
        short = [stream.short_rounds(end) for stream in streams]
        for number in sorted({number for each in short for number in each or ()}):
            sizes: dict[IndexStream, int] = {}
            for part, stream, rounds in zip(self.parts, streams, short, strict=True):
                if rounds is None:
                    return
                if stream.cycles or number < (part.exact_length or 0):
                    sizes[stream] = rounds.get(number, stream.item_size * self.world_size)
            most = [stream.item_size for stream in sizes]
            cuts = in_proportion(list(sizes.values()), self.world_size, most)
            if not are_proportional(list(cuts)):
                self._warn_of_proportions([cuts[list(sizes).index(each)] if each in sizes else [] for each in streams])
            for stream, cut in zip(sizes, cuts, strict=True):
                stream.cuts[number] = cut

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

    def source_states(self, places: Sequence[Place], is_over: bool) -> list[SourceState | None]:
        """Return the state of each loader's source; None for one without a state."""
        return [part.source_states([place], is_over)[0] for part, place in zip(self.parts, places, strict=True)]

    def plan_states(self, batches: Sequence[tuple[int, int]]) -> None:
        """Choose after which batches the sources' states are wanted; see ShardedLoader."""
        for part in self.parts:
            part.plan_states(batches)

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
        self.note_begun()
        return self._one_after_another() if self.combination == "sequential" else self._side_by_side()

    def _one_after_another(self) -> Iterator[Any]:
        left, place, begun = self.start_batch, self.start_batch - 1, 0
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
            uneven = part.share.uneven
            for number, batch in enumerate(batches, start=part.start_batch + read):
                place += 1
                if number in uneven:
                    self.uneven[place] = uneven[number]
                yield batch
            begun = place + 1 - left

    def _turn(self, index: int, left: int) -> int:
        """Begin a loader whose turn has come; return how many of the batches `left` before the start are jumped over in it."""
        part = self.parts[index]
        if self._places:
            return part.start_batch
        length = part.exact_length
        start = min(left, length) if length is not None else 0
        part.begin(self._seed_of(index), self.epoch, start, (), [] if start else self._left[index : index + 1])
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
            if self._has_ghosts:
                self._part_with_ghosts(batches, place)
            elif self.world_size > 1:
                self._note(there, place)
            if any(batch is END for batch in batches):
                batches = [None if batch is END else batch for batch in batches]
            yield self.loader.rebuilt(batches)
            place += 1

    def _begun(self, part: ShardedLoader) -> Iterator[Any]:
        length = part.exact_length
        is_over = length is not None and self.start_batch >= length and not part.share.cycles
        return iter(()) if is_over else iter(part)

    def _note(self, there: list[ShardedLoader], place: int) -> None:
        """Keep how the round of a batch is weighed, where it is uneven and its loaders agree on that."""
        sizes = [part.uneven.get(place) for part in there]
        if not any(sizes):
            return
        if are_proportional(sizes):
            self.uneven[place] = next(each for each in sizes if each)
        else:
            self._warn_of_proportions([part.uneven.get(place) if part in there else [] for part in self.parts])

    def _warn_of_proportions(self, sizes: list[list[int] | None]) -> None:
        """Say, once, that a round has no weight that is right for each loader; None stands for equal parts."""
        if self._has_warned:
            return
        self._has_warned = True
        told = []
        for number, (name, each) in enumerate(zip(self.loader.names, sizes, strict=True)):
            if each != []:
                parts = "equally many" if each is None else " and ".join(map(str, each))
                told.append(f"{parts} of loader {name or number!r}")
        rank_zero_warn(
            f"the {self.world_size} ranks cannot share a round of the combined loaders in one proportion: they have "
            f"{', '.join(told)}. Each rank's loss has the same weight in such a round, so its samples weigh otherwise than on "
            "one process. Give each loader a number of samples that the ranks share evenly, or drop_last=True.",
            stacklevel=2,
        )

    def _part_with_ghosts(self, batches: list[Any], place: int) -> None:
        """Find out whether the batches are those of a ghost; where they are not, take away those that others alone have."""
        pairs = zip(self.parts, batches, strict=True)
        is_real = [batch is not END and self._is_real(part, place) for part, batch in pairs]
        if not (all if self.combination == "min_size" else any)(is_real):
            self._ghost_at = place if self._ghost_at is None else self._ghost_at
        elif self.combination == "max_size":
            batches[:] = [batch if real else END for batch, real in zip(batches, is_real, strict=True)]

    def _is_real(self, part: ShardedLoader, place: int) -> bool:
        share = part.share
        real = share.real_first_pass if share.cycles else part.real_length
        return real is None or place < real

    def _combined(self, lengths: list[int | None]) -> int | None:
        known = [length for length in lengths if length is not None]
        return combined_length(known, self.combination) if len(known) == len(lengths) else None

    @property
    def length(self) -> int | None:
        """Return how many batches this rank has in a whole epoch; None where a loader has no length."""
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
        """Return how many of this rank's batches count in an evaluation; None while all that have come do."""
        return self._ghost_at

    def __len__(self) -> int:
        length = self.length
        if length is None:
            raise TypeError("a loader of this collection has no length, so the collection has none.")
        return length

    def weight_at(self, index: int) -> float:
        """Return the factor by which this rank's part in the round of a batch differs from an equal one."""
        return weight_of(self.uneven.get(index), self.rank)

    @property
    def may_read_ahead(self) -> bool:
        """Return whether a batch may be read before the one before it is done, with the same numbers drawn in both."""
        return all(part.may_read_ahead for part in self.parts)

    def refuse_parted_rounds(self, limit: int | None = None) -> None:
        """Refuse an evaluation of so many rounds in one of which some ranks alone have a batch of a loader (ValueError).

        To be called where a forward needs every rank. A step has one result for all loaders, of which no part can be dropped.
        """
        if not self._has_ghosts or self.combination != "max_size" or limit == 0:
            return
        lengths = [part.share.exact_source_length for part in self.parts]
        for number, (name, length) in enumerate(zip(self.loader.names, lengths, strict=True)):
            is_parted = length is None or (length % self.world_size and len(set(lengths)) > 1)
            # The round in which it ends is the one that is parted.
            if is_parted and (length is None or limit is None or length // self.world_size < limit):
                told = "a number of batches that is not known" if length is None else f"{length} batches"
                raise ValueError(
                    f"loader {name or number!r} of a CombinedLoader('max_size') has {told}, of which the {self.world_size} "
                    "ranks cannot each have as many, but under this strategy a forward needs every rank. Give it a number of "
                    "batches that the ranks share evenly, choose 'min_size' or 'sequential', or strategy='ddp'."
                )

    @property
    def is_shared(self) -> bool:
        """Return whether the ranks share all loaders; False on one process, and where the user has given each rank its own."""
        return all(part.is_shared for part in self.parts)

    @property
    def ends_alike(self) -> bool:
        """Return whether every rank sees the end at the same batch, or can know it beforehand from the lengths."""
        return self.exact_length is not None or all(part.ends_alike for part in self.parts)

    def _refuse_what_cannot_be_combined(self) -> None:
        lengths = [part.share.source_length if part.exact_length is not None else None for part in self.parts]
        if self._has_ghosts and self.combination == "sequential":
            raise TypeError(
                "loaders that are evaluated one after the other end on some ranks before others; share out each of them by "
                "itself."
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
