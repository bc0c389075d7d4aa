"""Combined: one rank's shard of several loaders side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from math import gcd
from typing import Any

from trainwright.data.combined_loader import CombinedLoader, combined_length, is_collection, is_read_once
from trainwright.data.index_stream import IndexStream
from trainwright.data.loader_state import StatefulLoader
from trainwright.data.loaders import ShardedLoader
from trainwright.data.seeding import derive_seed
from trainwright.data.source_state import SourceState
from trainwright.data.stateful_iterable import END
from trainwright.data.stream_shard import Mode, StreamPosition, even_sizes
from trainwright.errors import a_type_of
from trainwright.rank_zero import rank_zero_warn


class ShardedCombination(StatefulLoader):
    """One rank's shard of a CombinedLoader.

    Iterating yields the combined batches. The first loader keeps its usual order. Every other loader, and every new pass of a
    shorter loader, has a different order. In an evaluation batch number i of every loader goes to the same rank. So the ranks
    together have the combined batches of one process. In training the round in which a loader ends is re-split in the same
    proportions for all loaders.

    Raises:
        TypeError: a loader cannot be sharded.
        ValueError: the loaders cannot be combined in this mode, or there is too little data for the ranks.
    """

    def __init__(self, loader: CombinedLoader, *, rank: int, world_size: int, mode: Mode, **options: bool) -> None:
        super().__init__(loader, rank)
        self.world_size, self.mode = world_size, mode
        self.combination = loader.mode
        self.uneven: dict[int, list[int]] = {}
        self._pads = mode == "padded" and world_size > 1
        if self.combination == "sequential":
            raise ValueError(
                "CombinedLoader(mode='sequential') is for validation, test and predict. To train on the loaders choose "
                "'min_size', 'max_size' or 'max_size_cycle', or join their datasets by torch's ConcatDataset."
            )
        cycles = self.combination == "max_size_cycle"
        for name, leaf in zip(loader.names, loader.flattened, strict=True) if cycles else ():
            if is_read_once(leaf):
                raise TypeError(
                    f"the collection's {name or 'loader'} is {a_type_of(leaf)}, which can be read only once, but "
                    "max_size_cycle restarts shorter loaders; pass a list, a DataLoader, or an object whose __iter__ starts "
                    "from the beginning, or choose another mode."
                )
        self.parts = [
            ShardedLoader(leaf, rank=rank, world_size=world_size, mode=mode, cycles=cycles, **options)
            for leaf in loader.flattened
        ]
        """This rank's shard of each loader, in the order of `loader.flattened`."""
        self.shards = [part.shard for part in self.parts]
        self._start_batch = 0
        self._dummy_at: int | None = None
        self._has_warned = False
        lengths = [part.shard.source_length for part in self.parts if part.exact_length is not None]
        if cycles and {0} < set(lengths):
            raise ValueError(
                "a loader of this collection is empty, so max_size_cycle cannot restart it. Give it data, remove it, or "
                "choose mode='max_size'."
            )
        if self.exact_length is None:
            self.read_ahead()  # only reading the next round shows the combination's end

    def set_epoch(self, seed: int, epoch: int, start_batch: int = 0) -> None:
        places, sources = self._loaded["places"], self._loaded["sources"]
        if places and len(places) != len(self.parts):
            raise ValueError(
                f"the checkpoint's position in the data belongs to {len(places)} loaders, but now there are "
                f"{len(self.parts)}. Resume with the loaders of the saved run, or from a checkpoint at an epoch's end."
            )
        self._start_batch, self._dummy_at = start_batch, None
        self.uneven.clear()
        for index, part in enumerate(self.parts):
            part.load_state_dict({"places": places[index : index + 1], "sources": sources[index : index + 1]})
            # Equal seeds would correlate the loaders.
            part.set_epoch(derive_seed(seed, index) if index else seed, epoch, start_batch)
        end = self.exact_length
        cuts = self._plan(end) if end is not None and self.world_size > 1 and self.mode == "train" else {}
        for part in self.parts:  # so that no worker reads further
            ends_here = not part.shard.cycles and part.exact_length == end
            part.shard.plan_rounds(None if ends_here else end, cuts.get(part.stream, {}))

    def _plan(self, end: int) -> dict[IndexStream | None, dict[int, list[int]]]:
        """Return how to split the rounds before batch `end` that are not full, so that one loss weight is right for all."""
        streams = [part.stream for part in self.parts if part.stream is not None and part.is_sharded]
        short = [stream.short_rounds(end) for stream in streams]
        if len(streams) < len(self.parts) or None in short:
            return {}
        planned: dict[IndexStream | None, dict[int, list[int]]] = {stream: {} for stream in streams}
        for number in sorted({number for rounds in short for number in rounds or ()}):
            sizes = {
                stream: (rounds or {}).get(number, stream.item_size * self.world_size)
                for part, stream, rounds in zip(self.parts, streams, short, strict=True)
                if stream.cycles or number < (part.exact_length or 0)
            }
            cuts = in_proportion(list(sizes.values()), self.world_size, [stream.item_size for stream in sizes])
            split = dict(zip(sizes, cuts, strict=True))
            if not are_proportional(list(cuts)):
                self._warn_of_proportions([split.get(stream, []) for stream in streams])
            for stream, cut in split.items():
                planned[stream][number] = cut
        return planned

    def read_ahead(self) -> None:
        for part in self.parts:
            part.read_ahead()

    def positions(self, batch: int) -> list[StreamPosition]:
        return [shard.position(batch) for shard in self.shards]

    def source_states(self, positions: Sequence[StreamPosition], is_over: bool) -> list[SourceState | None]:
        pairs = zip(self.parts, positions, strict=True)
        return [part.source_states([position], is_over)[0] for part, position in pairs]

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def batches(self) -> Iterator[Any]:
        # A loader that is over starts no workers.
        iterators = [iter(()) if self._is_over(part) else iter(part) for part in self.parts]
        is_cycle = self.combination == "max_size_cycle"
        for number in count(self._start_batch):
            batches = []
            for index, iterator in enumerate(iterators):
                batch = next(iterator, END)
                if batch is END:
                    if self.combination == "min_size" or is_cycle:  # a cycling loader ends only where it is stopped
                        return
                    iterators[index] = iter(())  # the old iterator is deleted, which ends its workers
                batches.append(batch)
            there = [part for part, batch in zip(self.parts, batches, strict=True) if batch is not END]
            # Without lengths nothing stops cycling loaders, so the epoch ends after the first passes of all.
            first_passes = (part.shard.first_pass for part in self.parts)
            if not there or (is_cycle and all(end is not None and number >= end for end in first_passes)):
                return
            if self._pads:
                self._drop_dummies(batches, number)
            elif self.world_size > 1:
                self._record_uneven(there, number)
            yield self.loader.rebuilt([None if batch is END else batch for batch in batches])

    def _is_over(self, part: ShardedLoader) -> bool:
        return part.exact_length is not None and self._start_batch >= part.exact_length and not part.shard.cycles

    def _record_uneven(self, there: list[ShardedLoader], number: int) -> None:
        """Record the samples per rank of an uneven round if the proportion is the same for all loaders."""
        sizes = [part.uneven.get(number) for part in there]
        if not any(sizes):
            return
        if are_proportional(sizes):
            self.uneven[number] = next(size for size in sizes if size)
        else:
            self._warn_of_proportions([part.uneven.get(number) if part in there else [] for part in self.parts])

    def _warn_of_proportions(self, sizes: list[list[int] | None]) -> None:
        """Warn, once, of a round for which no weight is right for every loader. None means equal parts."""
        if self._has_warned:
            return
        self._has_warned = True
        parts = ", ".join(
            f"{'equally many' if counts is None else ' and '.join(map(str, counts))} of loader {name or number!r}"
            for number, (name, counts) in enumerate(zip(self.loader.names, sizes, strict=True))
            if counts != []
        )
        rank_zero_warn(
            f"the {self.world_size} ranks cannot divide a round of the combined loaders in one proportion: they have "
            f"{parts}. In such a round all ranks' losses have the same weight, so the samples are weighted differently "
            "than on one process. Give every loader a number of samples that divides evenly, or set drop_last=True.",
            stacklevel=2,
        )

    def _drop_dummies(self, batches: list[Any], number: int) -> None:
        """Record where this rank's batches become dummies. Before that, drop the batches that only other ranks have."""
        ends = [part.shard.real_first_pass if part.shard.cycles else part.real_length for part in self.parts]
        is_real = [batch is not END and (end is None or number < end) for end, batch in zip(ends, batches, strict=True)]
        if not (all if self.combination == "min_size" else any)(is_real):
            self._dummy_at = number if self._dummy_at is None else self._dummy_at
        elif self.combination == "max_size":
            batches[:] = [batch if real else END for batch, real in zip(batches, is_real, strict=True)]

    def combined(self, lengths: list[int | None]) -> int | None:
        known = [length for length in lengths if length is not None]
        return combined_length(known, self.combination) if len(known) == len(lengths) else None

    @property
    def real_length(self) -> int | None:
        return self._dummy_at

    @property
    def may_read_ahead(self) -> bool:
        return all(part.may_read_ahead for part in self.parts)

    def refuse_parted_rounds(self, limit: int | None = None) -> None:
        """Raise ValueError if only some ranks have a batch of a loader in a round and a forward needs every rank."""
        if not self._pads or self.combination != "max_size" or limit == 0:
            return
        lengths = [part.shard.exact_source_length for part in self.parts]
        for number, (name, length) in enumerate(zip(self.loader.names, lengths, strict=True)):
            is_parted = length is None or (length % self.world_size and len(set(lengths)) > 1)
            # The ranks differ in the round in which the loader ends.
            if is_parted and (length is None or limit is None or length // self.world_size < limit):
                batches = "an unknown number of batches" if length is None else f"{length} batches"
                raise ValueError(
                    f"loader {name or number!r} of a CombinedLoader('max_size') has {batches}, which the {self.world_size} "
                    "ranks cannot divide evenly, but under this strategy a forward needs every rank. Give the loader a "
                    "number of batches that divides evenly, choose 'min_size', or use strategy='ddp'."
                )

    @property
    def is_sharded(self) -> bool:
        """Return whether all loaders are sharded. They are not on one process, or if every rank has separate data."""
        return all(part.is_sharded for part in self.parts)

    @property
    def ends_together(self) -> bool:
        return self.exact_length is not None or all(part.ends_together for part in self.parts)


def shard(loader: Any, *, rank: int, world_size: int, mode: Mode, **options: Any) -> ShardedLoader | ShardedCombination:
    """Return this rank's shard of a loader or of a collection of loaders. The options are those of ShardedLoader."""
    if is_collection(loader):
        loader = CombinedLoader(loader, "max_size_cycle")
    kind = ShardedCombination if isinstance(loader, CombinedLoader) else ShardedLoader
    return kind(loader, rank=rank, world_size=world_size, mode=mode, **options)


def evaluation_loaders(
    loader: Any, *, rank: int, world_size: int, mode: Mode, **options: bool
) -> list[tuple[str | None, ShardedLoader | ShardedCombination]]:
    """Return this rank's shards of the loaders to evaluate, with their names (the keys of a dict).

    A CombinedLoader is one loader of combined batches, except in the mode "sequential".
    """
    if is_collection(loader):
        loader = CombinedLoader(loader, "sequential")
    named: list[tuple[str | None, Any]] = [(None, loader)]
    if isinstance(loader, CombinedLoader) and loader.mode == "sequential":
        named = [*zip(loader.names, loader.flattened, strict=True)]
    return [(name, shard(leaf, rank=rank, world_size=world_size, mode=mode, **options)) for name, leaf in named]


def in_proportion(samples: list[int], ranks: int, batch_sizes: list[int]) -> list[list[int]]:
    """Return the samples of a round per loader and rank, in the same proportion for all loaders.

    A rank gets at most as many samples in all as full batches of all loaders have. If the sizes allow no such split, every
    loader is split separately, over as many ranks as possible.
    """
    # A unit is the smallest part of the round that contains all loaders in the round's proportion.
    units = gcd(*samples)
    in_unit = [number // units for number in samples]
    most = sum(batch_sizes) // sum(in_unit)
    if most and most * ranks >= units:
        counts = even_sizes(units, ranks, most, least=1 if min(in_unit) > 1 else 2)
        return [[count * size for count in counts] for size in in_unit]
    return [even_sizes(number, ranks, size, least=1) for number, size in zip(samples, batch_sizes, strict=True)]


def are_proportional(parts: Sequence[list[int] | None]) -> bool:
    """Return whether every rank has the same proportion of all loaders' samples. None means equal parts."""
    ranks = max(len(sizes) for sizes in parts if sizes is not None)
    first, *others = (sizes or [1] * ranks for sizes in parts)
    return all([one * sum(other) for one in first] == [one * sum(first) for one in other] for other in others)
