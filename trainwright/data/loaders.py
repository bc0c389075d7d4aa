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
from typing import Any, NoReturn, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.datapipes.datapipe import IterDataPipe

from trainwright.data.batch_stream import BatchStream, distributed_sampler
from trainwright.data.epoch_listeners import set_epoch_of_parts
from trainwright.data.index_stream import IndexStream, in_dataset_order
from trainwright.data.loader_state import LoaderState, StatefulLoader
from trainwright.data.seeding import IsolatedGenerators, derive_seed
from trainwright.data.source_state import SourceState, SourceStates
from trainwright.data.stateful_iterable import StatefulCollate, StatefulIterable, StatefulWorkerStart, is_stateful
from trainwright.data.stateful_reader import END
from trainwright.data.stream_shard import Mode, StreamPosition
from trainwright.data.workers import (
    SeededDataset,
    SeededIterable,
    WorkerStart,
    holding_signals,
    note_begun,
    refuse_deep_folder,
)
from trainwright.rank_zero import rank_zero_warn


class ShardedLoader(StatefulLoader):
    """One rank's shard of a loader.

    Every rank reads all of an IterableDataset and keeps every N-th batch. No sample is lost or counted twice, and all ranks
    reach the end together, if it yields the same on every rank; its generators (python's, numpy's, torch's) get the same seed
    for that. It may be endless. One that splits itself by rank needs `shard=False`.

    Args:
        loader: a DataLoader; on one process, or with shard=False, any iterable of batches.
        rank, world_size, mode: see stream_shard.py.
        shard: False if the user gave each rank its own data, all of which is used. A DistributedSampler implies it.
        in_order: switch shuffling off; a user's own sampler keeps its order, with a warning.
        pin_memory: give batches in pinned memory.

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
            _refuse_unshardable(loader, world_size)
            if rank == 0 and isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
                _warn_of_whole_reads(loader, world_size)
        self.start_batch = 0
        self.stream: IndexStream | None = None
        self.shard: IndexStream | BatchStream
        """Which batches of the loader are this rank's."""
        self._base_seeds: torch.Generator | None = None
        self._with_workers: weakref.WeakSet[Any] = weakref.WeakSet()
        """Iterators whose workers may still run; weak, so that dropping an iterator ends its workers at once."""
        self._states: SourceStates | None = None
        self._is_training = mode == "train"
        self._continues = not in_order
        self.is_read_ahead = False
        """Whether a batch is read before the previous one is done, as when the length is unknown."""
        self._source: Iterable[Any] = self._copied(loader, pin_memory)
        if isinstance(loader, DataLoader) and _has_indices(loader):
            self.shard = self.stream = self._with_indices(self._source, loader, in_order)
            self.is_read_ahead = self.stream.source_length is None
        else:
            self.shard = self._with_batches(loader, in_order)
        self.uneven = self.shard.uneven

    def _copied(self, loader: Iterable[Any], pin_memory: bool) -> Any:
        if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
            if is_stateful(loader) and self._is_training:
                self._states = SourceStates(loader, None, self.world_size, self._continues, self.close)
            return loader  # an overridden __iter__ may not read the batch sampler
        if loader.num_workers > 0:
            refuse_deep_folder()
        clone = copy.copy(loader)
        # Through __dict__, because a DataLoader refuses a new sampler, and a subclass may define properties.
        clone.__dict__["_iterator"] = None  # a used persistent loader would keep its old index stream
        # The workers' base seed comes from here. Drawn from torch's global generator, it would leave a run that resumes within
        # an epoch one draw ahead of the uninterrupted run.
        clone.__dict__["generator"] = self._base_seeds = torch.Generator()
        if pin_memory:
            clone.__dict__["pin_memory"] = True
        if loader.num_workers > 0 and getattr(loader, "in_order", True) is False:
            clone.__dict__["in_order"] = True  # a position counts batches, so their order has to be known
            _warn_that_order_is_kept()
        is_pipe = isinstance(loader.dataset, IterDataPipe)
        has_state = isinstance(loader.dataset, IterableDataset) and is_stateful(loader.dataset)
        if has_state and self._is_training and not is_pipe:
            size = loader.batch_size if loader.batch_sampler is not None else None
            dataset = StatefulIterable(loader.dataset, size)
            clone.__dict__["dataset"] = dataset
            if loader.num_workers > 0:
                clone.__dict__["collate_fn"] = StatefulCollate(dataset, loader.collate_fn, size, loader.drop_last)
                clone.__dict__["worker_init_fn"] = StatefulWorkerStart(dataset, loader.worker_init_fn)
            self._states = SourceStates(clone, dataset, self.world_size, self._continues, self.close)
        elif loader.num_workers > 0 and not is_pipe:
            seeded = SeededIterable if isinstance(loader.dataset, IterableDataset) else SeededDataset
            clone.__dict__["dataset"] = seeded(loader.dataset)
            clone.__dict__["worker_init_fn"] = WorkerStart(loader.dataset, loader.worker_init_fn)
        if loader.num_workers > 0 and not is_pipe:
            # Patched to note the iterator; a weak reference, since a cycle would keep workers alive until it is collected.
            clone.__dict__["_get_iterator"] = partial(_begun, weakref.ref(clone), self._with_workers)
        return clone

    def close(self) -> None:
        """End the workers that still run: persistent ones, and those of an epoch that was left.

        Python's cycle collector would take 5 s a worker: it stops the threads that feed the workers' queues before torch sends
        its goodbye through them.
        """
        for iterator in self._with_workers:
            iterator._shutdown_workers()
        if isinstance(self._source, DataLoader) and self._source is not self.loader:
            self._source.__dict__["_iterator"] = None

    def _with_indices(self, clone: Any, loader: DataLoader[Any], in_order: bool) -> IndexStream:
        batched = loader.batch_sampler is not None
        source: Any = loader.batch_sampler if batched else loader.sampler
        if in_order:
            source, is_own = in_dataset_order(source)
            if is_own:
                _warn_of_kept_order(type(source.sampler if hasattr(source, "sampler") else source).__name__)
        same_on_ranks = self.is_sharded or self.world_size == 1
        stream = IndexStream(
            source,
            batched=batched,
            mode=self.mode,
            seed_rank=self.rank,
            same_on_ranks=same_on_ranks,
            gives_seeds=loader.num_workers > 0,
            **self._ranks,
        )
        clone.__dict__["batch_sampler" if batched else "sampler"] = stream
        return stream

    def _with_batches(self, loader: Iterable[Any], in_order: bool) -> BatchStream:
        is_loader = isinstance(loader, DataLoader)
        if in_order and is_loader and isinstance(getattr(loader, "sampler", None), RandomSampler):
            _warn_of_kept_order(type(loader).__name__)
        read_by_workers = is_loader and self._base_seeds is not None and getattr(loader, "num_workers", 0) > 0
        return BatchStream(
            self._source,
            mode=self.mode,
            seed_rank=0 if self.is_sharded else self.rank,  # ranks that read one stream must read the same
            generator=self._base_seeds,
            draws=not (isinstance(loader, Sequence) or read_by_workers),
            states=self._states,
            **self._ranks,
        )

    @property
    def _ranks(self) -> dict[str, int]:
        return {"rank": self.rank, "world_size": self.world_size} if self.is_sharded else {"rank": 0, "world_size": 1}

    def begin(self, seed: int, epoch: int, start_batch: int, state: LoaderState) -> None:
        self.start_batch = start_batch
        position, source = next(iter(state["places"]), None), next(iter(state["sources"]), None)
        if isinstance(self.shard, BatchStream):
            if source is not None and source["ranks"] != self.world_size > 1 and not self.is_sharded:
                source = None  # it is the state of another rank's data
            self.shard.set_epoch(seed, epoch, start_batch, position, source)
        else:
            self.shard.set_epoch(seed, epoch, start_batch, position)
        if self._base_seeds is not None:
            self._base_seeds.manual_seed(derive_seed(seed, epoch, self.rank))
        set_epoch_of_parts(self.loader, epoch)

    def __iter__(self) -> Iterator[Any]:
        self.note_begun()
        if self.stream is None:
            return self.shard.items()
        return self._isolated(self.stream) if self._isolates_draws else iter(self._source)

    def read_ahead(self) -> None:
        """Expect that a batch is read before the previous one is done, so that its draws must not come in between."""
        self.is_read_ahead = True

    @property
    def _isolates_draws(self) -> bool:
        """Return whether batches draw from isolated generators: this process fetches them, ahead of the training's draws."""
        return self.stream is not None and self.is_read_ahead and not self.stream.gives_seeds

    def _isolated(self, stream: IndexStream) -> Iterator[Any]:
        """Yield the batches; for each the same is drawn as in a worker."""
        batches = iter(self._source)
        for number in count(stream.start_batch):
            with IsolatedGenerators(stream.batch_seed(number)).active():
                batch = next(batches, END)
            if batch is END:
                return
            yield batch

    def positions(self, batch: int) -> list[StreamPosition]:
        return [self.shard.position(batch)]

    def source_states(self, positions: Sequence[StreamPosition], is_over: bool) -> list[SourceState | None]:
        """Return the source's state; None if it has none, or if each epoch starts as the first did."""
        if self._states is None or (is_over and not self._continues):
            return [None]
        return [(is_over and self._states.ending()) or self._states.at(positions[0])]

    def plan_states(self, batches: Sequence[tuple[int, int]]) -> None:
        """Choose the batches of this rank after which the source's state is taken: pairs of an interval and one such batch."""
        self.shard.plan_states(batches)

    @property
    def starts_beyond(self) -> bool:
        """Return whether the start is beyond the end of the data."""
        return self.shard.starts_beyond

    def note_indices(self) -> deque[list[Any]] | None:
        """Return a queue to which the next `iter` appends the dataset's indices of each batch; None for a loader without.

        Workers read ahead, so the queue may be some batches ahead too.
        """
        return None if self.stream is None else self.stream.note_indices()

    @property
    def length(self) -> int | None:
        """Return the batches of this rank in a whole epoch; None if the loader has no length."""
        return self.shard.length

    @property
    def whole_length(self) -> int | None:
        """Return the length of an epoch that runs at this world size from its start."""
        return self.shard.whole_length

    @property
    def exact_length(self) -> int | None:
        """Return the length if it is certain: of an index stream or a list, not the loader's own estimate."""
        return None if self.shard.exact_source_length is None else self.shard.length

    @property
    def real_length(self) -> int | None:
        """Return how many of this rank's batches count in an evaluation; None while all so far do."""
        return self.shard.real_length

    @property
    def may_read_ahead(self) -> bool:
        """Return whether a batch may be read before the previous one is done without changing what is drawn."""
        return self.stream is None or self.stream.gives_seeds or self._isolates_draws

    @property
    def ends_together(self) -> bool:
        """Return whether every rank sees the end at the same batch, or knows it in advance from the lengths."""
        return self.world_size == 1 or self.is_sharded or self.exact_length is not None


class Batches(Protocol):
    """What `with_last` reads: a ShardedLoader or a ShardedCombination."""

    @property
    def exact_length(self) -> int | None:
        """Return the batches in a whole epoch, if that is certain."""

    def __iter__(self) -> Iterator[Any]: ...


def _begun(loader: Callable[[], DataLoader[Any] | None], begun: weakref.WeakSet[Any]) -> Any:
    """Begin an iteration of a loader with workers, and note its iterator."""
    clone = loader()
    assert clone is not None
    with holding_signals():
        iterator = type(clone)._get_iterator(clone)
    note_begun(iterator, begun)
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
    at different batches (not `ends_together`), `all_have` says for each batch, and at the end, whether every rank has one; the
    first rank's end is everyone's.

    Raises:
        RuntimeError: the loader gives more batches than its whole length.
    """
    if length is not None:
        is_whole = length == loader.exact_length
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
            is_there = all_have(is_there)
        if held is not END:
            yield held, not is_there
        if not is_there:
            return
        held = batch


def refuse_length(length: int) -> NoReturn:
    """Raise for a loader that gives more batches than its length (RuntimeError)."""
    raise RuntimeError(
        f"the loader gives more batches than its length, {length}; make the __len__ of its sampler match what it yields."
    )


def _has_indices(loader: DataLoader[Any]) -> bool:
    """Return whether the loader has an index stream that can be replaced."""
    return not isinstance(loader.dataset, IterableDataset) and type(loader).__iter__ is DataLoader.__iter__


def _is_to_shard(loader: Iterable[Any], world_size: int, shard: bool) -> bool:
    """Return whether to shard the loader; refuse a DistributedSampler of another world size (ValueError)."""
    if world_size == 1 or not shard:
        return False
    sampler = distributed_sampler(loader) if isinstance(loader, DataLoader) else None
    if sampler is not None and sampler.num_replicas != world_size:
        raise ValueError(
            f"the loader's DistributedSampler has num_replicas={sampler.num_replicas}, but this job has {world_size} ranks; "
            f"leave the sampler out, since loaders are sharded for you, or pass num_replicas={world_size}."
        )
    return sampler is None


def _refuse_unshardable(loader: Iterable[Any], world_size: int) -> None:
    """Refuse a loader that cannot be sharded (TypeError)."""
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        return
    kind = type(loader).__name__
    reason = f"{kind} overrides __iter__" if isinstance(loader, DataLoader) else f"a {kind} is not a DataLoader"
    raise TypeError(
        f"this loader cannot be sharded over {world_size} ranks: {reason}. Pass a torch DataLoader, run on one device, or give "
        "each rank its own data and set use_distributed_sampler=False (or leave the loader out of prepare)."
    )


def _warn_of_whole_reads(loader: DataLoader[Any], world_size: int) -> None:
    """Warn that a dataset which splits itself by rank would be split twice: nothing else would show it."""
    warnings.warn(
        f"a {type(loader.dataset).__name__} is an IterableDataset: each of the {world_size} ranks reads all of it and keeps "
        f"one batch in {world_size}. If it splits itself by rank, set use_distributed_sampler=False (or leave its loader out "
        "of prepare).",
        stacklevel=2,
    )


def _warn_that_order_is_kept() -> None:
    rank_zero_warn(
        "the loader's in_order=False is ignored: batches come in the order in which they were drawn, so that a run can resume "
        "within an epoch and predictions are in the order of the dataset.",
        stacklevel=2,
    )


def _warn_of_kept_order(kind: str) -> None:
    warnings.warn(
        f"overfit_batches needs the same batches each epoch, but the loader's {kind} chooses its own order, which is kept; "
        "give the loader a sampler whose order does not change, or shuffle=True, which is switched off.",
        stacklevel=2,
    )
