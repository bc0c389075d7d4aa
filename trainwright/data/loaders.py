"""Loaders: a copy of a user's DataLoader that gives this rank's shard of its samples, in an order that is known in advance.

The user's loader is copied, never rebuilt, and only its index stream is replaced: a subclass keeps its constructor, its collate
function, its workers and everything else. A source without indices is read batch by batch (batch_stream.py). Several loaders at
once are combined.py's.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from operator import getitem
from typing import Any, NoReturn, Protocol, TypeGuard

import torch
from torch.autograd import profiler
from torch.autograd.profiler import record_function
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe, MapDataPipe, RandomSampler

from trainwright.data.batch_stream import BatchStream
from trainwright.data.index_stream import IndexStream, in_dataset_order
from trainwright.data.loader_state import StatefulLoader
from trainwright.data.seeding import IsolatedGenerators, derive_seed, read_isolated
from trainwright.data.source_state import SourceState, SourceStates
from trainwright.data.stateful_iterable import END, StatefulCollate, StatefulIterable, StatefulWorkerStart, is_stateful
from trainwright.data.stream_shard import Mode, StreamPosition
from trainwright.data.worker_process import forked_until_running
from trainwright.data.workers import (
    SeededDataset,
    SeededIterable,
    WorkerStart,
    holding_signals,
    is_split_after_shuffle,
    note_begun,
    refuse_deep_folder,
    set_epoch_of_parts,
)
from trainwright.errors import a_type_of
from trainwright.rank_zero import rank_zero_warn


class ShardedLoader(StatefulLoader):
    """One rank's shard of a loader.

    Every rank reads all of an IterableDataset and keeps every N-th batch. No sample is lost or counted twice, and all ranks
    reach the end together, if it yields the same on every rank; its generators (python's, numpy's, torch's) get the same seed
    for that. It may be endless. One that splits itself by rank needs `shard=False`.

    Args:
        loader: a DataLoader; on one process, or with shard=False, any iterable of batches.
        shard: False if the user gave each rank its own data, all of which is used. A DistributedSampler implies it.
        in_order: switch shuffling off; a user's own sampler keeps its order, with a warning.
        pin_memory: give batches in pinned memory.
        batch_parts: the loader's batches are this many ranks' together: each rank gets a part of every batch.

    Raises:
        TypeError: not an iterable, or one that cannot be sharded.
        ValueError: too little data for this many ranks.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        rank: int,
        world_size: int,
        mode: Mode,
        shard: bool = True,
        in_order: bool = False,
        pin_memory: bool = False,
        batch_parts: int = 1,
    ) -> None:
        if not isinstance(loader, Iterable):
            raise TypeError(
                f"expected a loader, but {type(loader).__name__} is not iterable; pass a torch DataLoader or a list of batches."
            )
        super().__init__(loader, rank)
        self.world_size, self.mode = world_size, mode
        self.is_sharded = _is_to_shard(loader, world_size, shard)
        """Whether the ranks read one stream; False on one process, and if the user gave each rank its own data."""
        if self.is_sharded:
            _check_shardable(loader, world_size)
        if batch_parts > 1:
            _check_parts(loader, batch_parts, self.is_sharded)
        self.batch_parts = batch_parts
        self.start_batch = 0
        self._announced_epoch = -1
        self.stream: IndexStream | None = None
        self.shard: IndexStream | BatchStream
        self._base_seeds: torch.Generator | None = None
        self._with_workers: weakref.WeakSet[Any] = weakref.WeakSet()
        """Iterators whose workers may still run; weak, so that dropping an iterator ends its workers at once."""
        self._states: SourceStates | None = None
        self._continues = not in_order
        self._is_read_ahead = False
        """Whether a batch is read before the previous one is done, as when the length is unknown."""
        self._source: Iterable[Any] = self._copied(loader, pin_memory) if _is_plain(loader) else loader
        if mode == "train" and self._source is loader and is_stateful(loader):
            self._states = SourceStates(loader, None, world_size, self._continues, self.close)
        if _is_plain(loader) and not isinstance(loader.dataset, IterableDataset):
            self.shard = self.stream = self._with_indices(self._source, loader, in_order)
            self._is_read_ahead = self.stream.source_length is None
        else:
            self.shard = self._with_batches(loader, in_order)
        self.shards, self.uneven = [self.shard], self.shard.uneven

    def _copied(self, loader: DataLoader[Any], pin_memory: bool) -> DataLoader[Any]:
        clone, dataset, num_workers = copy.copy(loader), loader.dataset, loader.num_workers
        # Through __dict__, because a DataLoader refuses a new sampler, and a subclass may define properties.
        own = clone.__dict__
        own["_iterator"] = None  # a used persistent loader would keep its old index stream
        # The workers' base seed comes from here. Drawn from torch's global generator, it would leave a run that resumes within
        # an epoch one draw ahead of the uninterrupted run.
        own["generator"] = self._base_seeds = torch.Generator()
        if pin_memory:
            own["pin_memory"] = True
        if num_workers > 0:
            refuse_deep_folder()
            if getattr(loader, "in_order", True) is False:
                own["in_order"] = True  # a position counts batches, so their order has to be known
                rank_zero_warn(
                    "the loader's in_order=False is ignored: batches come in the order in which they were drawn, so that a run "
                    "can resume within an epoch and predictions are in the order of the dataset.",
                    stacklevel=2,
                )
        is_iterable = isinstance(dataset, IterableDataset)
        size = loader.batch_size if loader.batch_sampler is not None else None
        if self.batch_parts > 1 and size is not None:  # N smaller batches in turn are the parts of one of the loader's
            size = own["batch_size"] = size // self.batch_parts
            own["batch_sampler"] = BatchSampler(loader.sampler, size, loader.drop_last)
        if isinstance(dataset, IterDataPipe):
            return clone
        if is_fixed := is_split_after_shuffle(dataset):
            text = "each epoch has the same order, as a split by take() or skip() follows a shuffle; shuffle after the split."
            rank_zero_warn(f"the data is a stream of the package datasets: {text}", stacklevel=2)
        # The state of a stream without an epoch would begin the next one at its end.
        if is_iterable and self.mode == "train" and is_stateful(dataset) and not is_fixed:
            own["dataset"] = stateful = StatefulIterable(dataset, size)
            if num_workers > 0:
                own["collate_fn"] = StatefulCollate(stateful, loader.collate_fn, size, loader.drop_last)
                own["worker_init_fn"] = StatefulWorkerStart(stateful, loader.worker_init_fn)
            self._states = SourceStates(clone, stateful, self.world_size, self._continues, self.close)
        elif num_workers > 0:
            own["dataset"] = SeededIterable(dataset) if is_iterable else SeededDataset(dataset)
            own["worker_init_fn"] = WorkerStart(dataset, loader.worker_init_fn)
        if num_workers > 0:
            # Patched to note the iterator; a weak reference, since a cycle would keep workers alive until it is collected.
            own["_get_iterator"] = partial(_begun, weakref.ref(clone), self._with_workers)
        return clone

    def close(self) -> None:
        """End the workers that still run; Python's cycle collector would take 5 s for each."""
        for iterator in self._with_workers:
            iterator._shutdown_workers()
        if isinstance(self._source, DataLoader) and self._source is not self.loader:
            self._source.__dict__["_iterator"] = None

    def _with_indices(self, clone: Any, loader: DataLoader[Any], in_order: bool) -> IndexStream:
        batched = loader.batch_sampler is not None
        source: Any = clone.batch_sampler if batched else loader.sampler
        is_whole = type(source) is BatchSampler or not self.is_sharded
        if in_order:
            # A batch sampler may choose more than the order, and a DistributedSampler the samples of this rank.
            is_kept = hasattr(loader.sampler, "num_replicas") or (batched and type(source) is not BatchSampler)
            in_order_source, chooser = in_dataset_order(source, loader.dataset)
            if chooser is not None:
                _warn_of_order(chooser, is_kept)
            source = source if is_kept else in_order_source
        stream = IndexStream(
            source,
            batched=batched,
            mode=self.mode,
            seed_rank=self.rank,
            same_on_ranks=self.is_sharded or self.world_size == 1,
            gives_seeds=loader.num_workers > 0,
            portion=(0, 1) if is_whole or self.batch_parts == 1 else (self.rank, self.batch_parts),
            **(self._ranks if is_whole or self.batch_parts == 1 else {"rank": 0, "world_size": 1}),
        )
        clone.__dict__["batch_sampler" if batched else "sampler"] = stream
        return stream

    def _with_batches(self, loader: Iterable[Any], in_order: bool) -> BatchStream:
        if in_order and isinstance(loader, DataLoader) and isinstance(loader.sampler, RandomSampler):
            _warn_of_order(loader, True)
        is_read_by_workers = _is_plain(loader) and loader.num_workers > 0
        return BatchStream(
            self._source,
            mode=self.mode,
            seed_rank=0 if self.is_sharded else self.rank,  # ranks that read one stream must read the same
            generator=self._base_seeds,
            draws=not (isinstance(loader, Sequence) or is_read_by_workers),
            states=self._states,
            **self._ranks,
        )

    @property
    def _ranks(self) -> dict[str, int]:
        return {"rank": self.rank, "world_size": self.world_size} if self.is_sharded else {"rank": 0, "world_size": 1}

    def set_epoch(self, seed: int, epoch: int, start_batch: int = 0) -> None:
        self.start_batch = start_batch
        position, source = next(iter(self._loaded["places"]), None), next(iter(self._loaded["sources"]), None)
        if isinstance(self.shard, BatchStream):
            if source is not None and source["ranks"] != self.world_size > 1 and not self.is_sharded:
                source = None  # it is the state of another rank's data
            self.shard.set_epoch(seed, epoch, start_batch, position, source)
        else:
            self.shard.set_epoch(seed, epoch, start_batch, position)
        if self._base_seeds is not None:
            self._base_seeds.manual_seed(derive_seed(seed, epoch, self.rank))
        if epoch != self._announced_epoch or self.mode != "train":  # training seeks its position twice
            set_epoch_of_parts(self.loader, epoch)
            self._announced_epoch = epoch

    def batches(self) -> Iterator[Any]:
        if self.stream is None:
            return self.shard.items()
        batches = fetched(self._source) if is_fetched_here(self._source) else iter(self._source)
        if not self._isolates_draws:
            return batches
        seeds = map(
            self.stream.batch_seed, count(self.stream.start_batch)
        )  # so each batch draws the same as in a worker
        return read_isolated(batches, map(IsolatedGenerators, seeds))

    def read_ahead(self) -> None:
        """Expect that a batch is read before the previous one is done, so that its draws must not come in between."""
        self._is_read_ahead = True

    @property
    def _isolates_draws(self) -> bool:
        """Return whether batches draw from isolated generators: this process fetches them, ahead of the training's draws."""
        return self.stream is not None and self._is_read_ahead and not self.stream.gives_seeds

    def positions(self, batch: int) -> list[StreamPosition]:
        return [self.shard.position(batch)]

    def source_states(self, positions: Sequence[StreamPosition], is_over: bool) -> list[SourceState | None]:
        if self._states is None or (is_over and not self._continues):
            return [None]  # it has no state, or each epoch starts as the first did
        return [(is_over and self._states.ending()) or self._states.at(positions[0])]

    def combined(self, lengths: list[int | None]) -> int | None:
        return lengths[0]

    def note_indices(self) -> deque[list[Any]] | None:
        """Return a queue to which the next `iter` appends each batch's indices as it is read; None for a loader without."""
        return None if self.stream is None else self.stream.note_indices()

    @property
    def real_length(self) -> int | None:
        return self.shard.real_length

    @property
    def may_read_ahead(self) -> bool:
        """Return whether a batch may be read before the previous one is done without changing what is drawn."""
        return self.stream is None or self.stream.gives_seeds or self._isolates_draws

    @property
    def seeks(self) -> bool:
        """Return whether an epoch can begin at any batch without reading those before."""
        return self.stream is not None

    @property
    def ends_together(self) -> bool:
        """Return whether every rank sees the end at the same batch, or knows it in advance from the lengths."""
        return self.world_size == 1 or self.is_sharded or self.exact_length is not None


class Batches(Protocol):
    @property
    def exact_length(self) -> int | None:
        """Return the batches in a whole epoch, if that is certain."""

    def __iter__(self) -> Iterator[Any]: ...


def _begun(loader: Callable[[], DataLoader[Any] | None], begun: weakref.WeakSet[Any]) -> Any:
    """Begin an iteration of a loader with workers, and note its iterator."""
    clone = loader()
    assert clone is not None
    with holding_signals(), forked_until_running(clone):
        iterator = type(clone)._get_iterator(clone)
    begun.add(iterator)
    note_begun(iterator)
    return iterator


def with_last(
    loader: Batches,
    start: int,
    length: int | None,
    most: int | None = None,
    all_have: Callable[[bool], bool] | None = None,
) -> Iterator[tuple[Any, bool]]:
    """Yield (batch, whether it is the last); without a known length one batch is read ahead to know.

    The loader begins at batch number `start` of `length`; `most` limits the batches if no length is known. If the ranks may end
    at different batches (not `ends_together`), `all_have` returns for each batch, and at the end, whether every rank has one;
    all end with the first rank that does. RuntimeError if the loader yields more batches than its whole length.
    """
    if length is not None:
        is_whole = length == loader.exact_length
        # An exact length is not cut off here, so that a batch beyond it is noticed.
        for index, batch in enumerate(loader if is_whole else islice(loader, max(0, length - start)), start=start + 1):
            if index > length:
                refuse_length(length)
            yield batch, index == length
        return
    batches = islice(loader, None if most is None else max(0, most - start))
    held: Any = END
    while True:
        batch = next(batches, END)
        is_there = batch is not END
        if all_have is not None:
            # NOTE: a collective. A rank calls it at its end too, or those that still have a batch would wait.
            is_there = all_have(is_there)
        if held is not END:
            yield held, not is_there
        if not is_there:
            return
        held = batch


def refuse_length(length: int) -> NoReturn:
    """Raise for a loader that yields more batches than its length (RuntimeError)."""
    raise RuntimeError(
        f"the loader yields more batches than its length, {length}; make the __len__ of its sampler match what it yields."
    )


def _is_plain(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    """Return whether this is a DataLoader that iterates as torch's does; another `__iter__` may not read the batch sampler."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def _is_to_shard(loader: Iterable[Any], world_size: int, shard: bool) -> bool:
    """Return whether to shard the loader; refuse a DistributedSampler of a different world size (ValueError)."""
    if world_size == 1 or not shard:
        return False
    samplers: list[Any] = (
        [loader.sampler, getattr(loader.batch_sampler, "sampler", None)] if isinstance(loader, DataLoader) else []
    )
    found = [each for each in samplers if hasattr(each, "num_replicas")]  # a DistributedSampler, or another library's
    if found and found[0].num_replicas != world_size:
        raise ValueError(
            f"the loader's {type(found[0]).__name__} has num_replicas={found[0].num_replicas}, but this job has {world_size} "
            f"ranks; leave the sampler out, since loaders are sharded for you, or pass num_replicas={world_size}."
        )
    return not found


def _check_shardable(loader: Iterable[Any], world_size: int) -> None:
    if not _is_plain(loader):
        overrides = f"{type(loader).__name__} overrides __iter__"
        reason = overrides if isinstance(loader, DataLoader) else f"{a_type_of(loader)} is not a DataLoader"
        raise TypeError(
            f"this loader cannot be sharded over {world_size} ranks: {reason}. Pass a torch DataLoader, run on one device, or "
            "give each rank its own data and set use_distributed_sampler=False (or leave the loader out of prepare)."
        )


def _check_parts(loader: Iterable[Any], parts: int, is_sharded: bool) -> None:
    """Refuse a loader whose batches cannot be divided into this many equal parts (ValueError)."""
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    if sampler is None:
        raise ValueError(
            f"split_batches=True divides each batch over {parts} ranks, but this {type(loader).__name__} has batch_size=None: "
            "its dataset makes the batches. Pass a batch_size, or split_batches=False with smaller batches."
        )
    if isinstance(size, int) and size % parts:
        raise ValueError(
            f"split_batches=True divides each batch over {parts} ranks, but batch_size={size} is not divisible by that; pass "
            f"batch_size={-(-size // parts) * parts}, or split_batches=False with the batch size of one rank."
        )
    if type(sampler) is not BatchSampler and not is_sharded:
        raise ValueError(
            f"split_batches=True cannot divide the batches of {a_type_of(sampler)} where rank 0 reads for all "
            "(dispatch_batches=True), or with a DistributedSampler; let it make smaller batches, and pass split_batches=False."
        )


def _warn_of_order(chooser: Any, is_kept: bool) -> None:
    warnings.warn(
        f"overfit_batches needs the same batches each epoch, but the loader's {type(chooser).__name__} chooses its own order, "
        f"which is {'kept; give the loader another sampler' if is_kept else 'replaced by the order of the dataset'}.",
        stacklevel=2,
    )


REGION = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
"""What torch's profiler calls the fetch of a batch, so that its tables show it under the name that its users know."""


def is_fetched_here(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    """Return whether `fetched` gives what iterating this loader over a map-style dataset would."""
    # Torch's own iterator takes 5 to 10 us a batch for what such a loader does not use: a profiler's region, workers, pinning.
    return (
        isinstance(loader, DataLoader)
        and loader.num_workers == 0
        and not loader.pin_memory
        and not loader.timeout
        and type(loader)._get_iterator is DataLoader._get_iterator
        and not isinstance(loader.dataset, (IterDataPipe, MapDataPipe))
    )


def fetched(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator over the batches; the sampler's iteration begins now."""
    collate: Callable[[Any], Any] = loader.collate_fn
    dataset: Any = loader.dataset
    read = getattr(dataset, "__getitems__", None) if loader._auto_collation else partial(getitem, dataset)

    def fetch(wanted: Any, region: record_function | None = None) -> Any:
        if region is None and profiler._is_profiler_enabled:
            with record_function(REGION) as region:
                return fetch(wanted, region)
        if read:
            return collate(read(wanted))
        # Not list(map(...)), which would take a StopIteration of the dataset for the end of the batch and lose samples.
        return collate([dataset[index] for index in wanted])

    return map(fetch, loader._index_sampler)
