"""Loaders: a copy of a user's DataLoader that yields this rank's shard, in an order that is known in advance.

The user's loader is copied, never rebuilt, and only its index stream is replaced. So a subclass keeps its collate function,
its workers and everything else. A source without indices is read batch by batch (batch_stream.py). combined.py shards
several loaders at once.
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
from typing import Any, NoReturn, TypeGuard

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe, MapDataPipe, RandomSampler

from trainwright.data.batch_stream import BatchStream
from trainwright.data.buckets import LengthBucketSampler
from trainwright.data.index_stream import IndexStream, in_dataset_order
from trainwright.data.loader_state import StatefulLoader
from trainwright.data.seeding import IsolatedGenerators, derive_seed, read_isolated
from trainwright.data.source_state import SourceState, SourceStates
from trainwright.data.stateful_iterable import END, StatefulCollate, StatefulIterable, StatefulWorkerStart, is_stateful
from trainwright.data.stream_shard import Mode, StreamPosition
from trainwright.data.vendor import (
    end_workers,
    forget_iterator,
    has_torchs_iterator,
    is_split_after_shuffle,
    record_iterators,
)
from trainwright.data.workers import SeededDataset, SeededIterable, WorkerStart, set_epoch_of_parts
from trainwright.errors import a_type_of
from trainwright.rank_zero import rank_zero_warn


class ShardedLoader(StatefulLoader):
    """One rank's shard of a loader.

    Every rank reads all of an IterableDataset, which may be endless, and keeps every N-th batch. If the dataset yields the
    same on every rank, no sample is lost or counted twice, and all ranks reach the end together. So its random number
    generators get the same seed everywhere. A dataset that splits its data by rank needs `shard=False`.

    Args:
        loader: a DataLoader. On one process, or with shard=False, it may be any iterable of batches.
        shard: False if every rank has separate data, all of which is used. A DistributedSampler implies it.
        in_order: disable shuffling. A user's sampler keeps its order, with a warning.
        pin_memory: return batches in pinned memory.
        batch_parts: the number of ranks that share every batch of the loader.
        cycles: begin another pass whenever the loader ends.

    Raises:
        TypeError: the loader is not iterable, or cannot be sharded.
        ValueError: there is too little data for the ranks.
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
        cycles: bool = False,
    ) -> None:
        if not isinstance(loader, Iterable):
            raise TypeError(
                f"expected a loader, but {type(loader).__name__} is not iterable. Pass a torch DataLoader or a list of "
                "batches."
            )
        super().__init__(loader, rank)
        self.world_size, self.mode = world_size, mode
        self.is_sharded = _is_to_shard(loader, world_size, shard)
        """Whether the ranks read one stream. They do not on one process, or if every rank has separate data."""
        if self.is_sharded:
            _check_shardable(loader, world_size)
        if batch_parts > 1:
            _check_parts(loader, batch_parts)
        self.batch_parts, self._cycles = batch_parts, cycles
        self._announced_epoch = -1
        self.stream: IndexStream | None = None
        self.shard: IndexStream | BatchStream
        self._base_seeds: torch.Generator | None = None
        self._with_workers: weakref.WeakSet[Any] = weakref.WeakSet()
        """Iterators whose workers may still run. The references are weak, so deleting an iterator ends its workers at once."""
        self._states: SourceStates | None = None
        self._continues = not in_order
        self._is_read_ahead = False
        """Whether a batch is read before the previous batch is done, for example because the length is unknown."""
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
        clone = copy.copy(loader)
        # Through __dict__, because a DataLoader rejects a new sampler, and a subclass may define properties.
        attributes = clone.__dict__
        forget_iterator(clone)  # a used persistent loader would keep its old index stream
        # The workers' base seed comes from here. Drawn from torch's global generator, it would leave a run that resumes
        # within an epoch one draw ahead of the uninterrupted run.
        attributes["generator"] = self._base_seeds = torch.Generator()
        if pin_memory:
            attributes["pin_memory"] = True
        if self.batch_parts > 1:
            # N smaller batches are the ranks' parts of one of the loader's batches.
            whole: Any = loader.batch_sampler
            attributes["batch_sampler"] = BatchSampler(
                whole.sampler, whole.batch_size // self.batch_parts, whole.drop_last
            )
            attributes["batch_size"] = loader.batch_size and loader.batch_size // self.batch_parts
        if not isinstance(loader.dataset, IterDataPipe):
            self._replace_dataset(clone)
        if loader.num_workers > 0:
            if getattr(loader, "in_order", True) is False:
                attributes["in_order"] = True  # a position counts batches, so their order must be known
                rank_zero_warn(
                    "the loader's in_order=False is ignored: batches come in the order in which they were drawn, so that a "
                    "run can resume within an epoch and predictions are in the order of the dataset.",
                    stacklevel=2,
                )
            record_iterators(clone, self._with_workers)
        return clone

    def _replace_dataset(self, clone: DataLoader[Any]) -> None:
        """Wrap the dataset of the copy, so that its state is known and its workers are seeded."""
        dataset, attributes = clone.dataset, clone.__dict__
        size = None if clone.batch_sampler is None else clone.batch_size
        is_iterable, has_workers = isinstance(dataset, IterableDataset), clone.num_workers > 0
        if is_fixed := is_split_after_shuffle(dataset):
            text = (
                "every epoch has the same order, because take() or skip() follows a shuffle. Shuffle after the split."
            )
            rank_zero_warn(f"the data is a stream of the package datasets: {text}", stacklevel=2)
        # The state of a stream without an epoch would begin the next epoch at its end.
        if is_iterable and self.mode == "train" and is_stateful(dataset) and not is_fixed:
            attributes["dataset"] = stateful = StatefulIterable(dataset, size)
            if has_workers:
                attributes["collate_fn"] = StatefulCollate(stateful, clone.collate_fn, size, clone.drop_last)
                attributes["worker_init_fn"] = StatefulWorkerStart(stateful, clone.worker_init_fn)
            self._states = SourceStates(clone, stateful, self.world_size, self._continues, self.close)
        elif has_workers:
            attributes["dataset"] = SeededIterable(dataset) if is_iterable else SeededDataset(dataset)
            attributes["worker_init_fn"] = WorkerStart(dataset, clone.worker_init_fn)

    def close(self) -> None:
        """End the workers that still run. Python's cycle collector would take 5 s per iterator."""
        end_workers(self._with_workers)
        if isinstance(self._source, DataLoader) and self._source is not self.loader:
            forget_iterator(self._source)

    def _with_indices(self, clone: Any, loader: DataLoader[Any], in_order: bool) -> IndexStream:
        batched = loader.batch_sampler is not None
        source: Any = clone.batch_sampler if batched else loader.sampler
        if batched and isinstance(loader.sampler, LengthBucketSampler):
            raise TypeError(
                "LengthBucketSampler returns batches: pass it as DataLoader(batch_sampler=), not as sampler=."
            )
        if isinstance(source, LengthBucketSampler):
            source.check_dataset(loader.dataset)
        if in_order:
            # A batch sampler may choose more than the order, and a DistributedSampler chooses this rank's samples.
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
            **self._ranks,
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
    def _ranks(self) -> dict[str, Any]:
        ranks = {"rank": self.rank, "world_size": self.world_size} if self.is_sharded else {"rank": 0, "world_size": 1}
        return {**ranks, "cycles": self._cycles}

    def set_epoch(self, seed: int, epoch: int, start_batch: int = 0) -> None:
        position, source = next(iter(self._loaded["places"]), None), next(iter(self._loaded["sources"]), None)
        if isinstance(self.shard, BatchStream):
            if source is not None and source["ranks"] != self.world_size > 1 and not self.is_sharded:
                source = None  # the state may belong to another rank's data
            self.shard.set_epoch(seed, epoch, start_batch, position, source)
        if self._base_seeds is not None:
            self._base_seeds.manual_seed(derive_seed(seed, epoch, self.rank))
        if epoch != self._announced_epoch or self.mode != "train":  # a training run seeks its position twice
            set_epoch_of_parts(self.loader, epoch)
            self._announced_epoch = epoch
        if self.stream is not None:  # last, because the length of a sampler may depend on its epoch
            self.stream.set_epoch(seed, epoch, start_batch, position)

    def batches(self) -> Iterator[Any]:
        if self.stream is None:
            return self.shard.items()
        batches = fetched(self._source) if is_fetched_here(self._source) else iter(self._source)
        if not self._isolates_draws:
            return batches
        # With these seeds a batch draws the same random numbers as in a worker.
        seeds = map(self.stream.batch_seed, count(self.stream.start_batch))
        return read_isolated(batches, map(IsolatedGenerators, seeds))

    def read_ahead(self) -> None:
        """Expect that a batch is read before the previous batch is done, so that reading must not affect its RNG state."""
        self._is_read_ahead = True

    @property
    def _isolates_draws(self) -> bool:
        """Return whether batches use isolated generators, because this process fetches them ahead of the training."""
        return self.stream is not None and self._is_read_ahead and not self.stream.gives_seeds

    def positions(self, batch: int) -> list[StreamPosition]:
        return [self.shard.position(batch)]

    def source_states(self, positions: Sequence[StreamPosition], is_over: bool) -> list[SourceState | None]:
        if self._states is None or (is_over and not self._continues):
            return [None]  # the source has no state, or every epoch starts like the first
        return [(is_over and self._states.ending()) or self._states.at(positions[0])]

    def combined(self, lengths: list[int | None]) -> int | None:
        return lengths[0]

    def note_indices(self) -> deque[list[Any]] | None:
        """Return a queue to which the next `iter` appends the indices of its batches, or None for a loader without indices."""
        return None if self.stream is None else self.stream.note_indices()

    @property
    def real_length(self) -> int | None:
        return self.shard.real_length

    @property
    def may_read_ahead(self) -> bool:
        """Return whether a batch may be read before the previous batch is done without changing its random numbers."""
        return self.stream is None or self.stream.gives_seeds or self._isolates_draws

    @property
    def seeks(self) -> bool:
        """Return whether an epoch can begin at any batch without reading the batches before."""
        return self.stream is not None

    @property
    def ends_together(self) -> bool:
        """Return whether every rank reaches the end at the same batch, or knows it in advance from the lengths."""
        return self.world_size == 1 or self.is_sharded or self.exact_length is not None


def with_last(
    loader: StatefulLoader,
    start: int,
    length: int | None,
    most: int | None = None,
    all_have: Callable[[bool], bool] | None = None,
) -> Iterator[tuple[Any, bool]]:
    """Yield (batch, whether it is the last). If the length is unknown, read one batch ahead.

    The loader begins at batch number `start` of `length`. If the length is unknown, `most` limits the batches. If the ranks
    may end at different batches (not `ends_together`), `all_have` is called for every batch and at the end. It returns
    whether every rank has a batch, and all ranks end together with the first. RuntimeError if the loader yields more
    batches than its length.
    """
    if length is not None:
        is_whole = length == loader.exact_length
        # An exact length is not cut off here, so that a batch beyond it raises an error.
        for index, batch in enumerate(loader if is_whole else islice(loader, max(0, length - start)), start=start + 1):
            if index > length:
                refuse_length(length)
            yield batch, index == length
        return
    batches = islice(loader, None if most is None else max(0, most - start))
    previous: Any = END
    while True:
        batch = next(batches, END)
        has_batch = batch is not END
        if all_have is not None:
            # NOTE: a collective. A rank calls it at its end too, or ranks that still have a batch would wait.
            has_batch = all_have(has_batch)
        if previous is not END:
            yield previous, not has_batch
        if not has_batch:
            return
        previous = batch


def refuse_length(length: int) -> NoReturn:
    """Raise for a loader that yields more batches than its length (RuntimeError)."""
    raise RuntimeError(f"the loader yields more batches than its length, {length}. Correct its sampler's __len__.")


def _is_plain(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    """Return whether this is a DataLoader with torch's `__iter__`. Another `__iter__` may not read the batch sampler."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def _is_to_shard(loader: Iterable[Any], world_size: int, shard: bool) -> bool:
    """Return whether to shard the loader. Reject a DistributedSampler of a different world size (ValueError)."""
    if world_size == 1 or not shard:
        return False
    samplers: list[Any] = (
        [loader.sampler, getattr(loader.batch_sampler, "sampler", None)] if isinstance(loader, DataLoader) else []
    )
    # torch's DistributedSampler or another library's.
    distributed = next((sampler for sampler in samplers if hasattr(sampler, "num_replicas")), None)
    if distributed is not None and distributed.num_replicas != world_size:
        raise ValueError(
            f"the loader's {type(distributed).__name__} has num_replicas={distributed.num_replicas}, but this job has "
            f"{world_size} ranks. Remove the sampler, since loaders are sharded for you, or pass num_replicas={world_size}."
        )
    return distributed is None


def _check_shardable(loader: Iterable[Any], world_size: int) -> None:
    if not _is_plain(loader):
        overrides = f"{type(loader).__name__} overrides __iter__"
        reason = overrides if isinstance(loader, DataLoader) else f"{a_type_of(loader)} is not a DataLoader"
        raise TypeError(
            f"this loader cannot be sharded over {world_size} ranks: {reason}. Pass a torch DataLoader, or run on one "
            "device. Or read separate data on every rank and set use_distributed_sampler=False (or do not pass the loader "
            "to prepare)."
        )


def _check_parts(loader: Iterable[Any], parts: int) -> None:
    """Reject a loader whose batches cannot be divided into this many equal parts (ValueError)."""
    sampler = getattr(loader, "batch_sampler", None)
    size: Any = getattr(sampler, "batch_size", None)
    if type(sampler) is not BatchSampler or size % parts:
        raise ValueError(
            f"split_batches=True divides a batch over {parts} ranks, and this {type(loader).__name__} has the batch sampler "
            f"{type(sampler).__name__} with batch_size={size}. Pass a batch_size that is divisible by {parts}, or "
            "split_batches=False with the batch size of one rank."
        )


def _warn_of_order(chooser: object, is_kept: bool) -> None:
    warnings.warn(
        f"overfit_batches needs the same batches in every epoch, but the loader's {type(chooser).__name__} chooses the "
        f"order. {'Pass another sampler to the loader' if is_kept else 'The order of the dataset replaces it'}.",
        stacklevel=2,
    )


def is_fetched_here(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    """Return whether `fetched` yields the same batches as iterating this loader over a map-style dataset."""
    # torch's iterator takes 5 to 10 us per batch for features that such a loader does not use, such as workers and pinning.
    return (
        isinstance(loader, DataLoader)
        and loader.num_workers == 0
        and not loader.pin_memory
        and not loader.timeout
        and has_torchs_iterator(loader)
        and not isinstance(loader.dataset, (IterDataPipe, MapDataPipe))
    )


def fetched(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator over the batches. The sampler's iteration begins now."""
    collate: Callable[[Any], Any] = loader.collate_fn
    dataset: Any = loader.dataset
    batches = loader.batch_sampler
    read = partial(getitem, dataset) if batches is None else getattr(dataset, "__getitems__", None)

    def fetch(wanted: Any) -> Any:
        if read:
            return collate(read(wanted))
        # Not list(map(...)), which would mistake a StopIteration of the dataset for the end of the batch and lose samples.
        return collate([dataset[index] for index in wanted])

    return map(fetch, loader.sampler if batches is None else batches)
