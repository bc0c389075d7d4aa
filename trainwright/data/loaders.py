"""Loaders: a user's DataLoader with this rank's share of its samples, in an order that is known beforehand.

The user's loader is copied, never built anew, and only its index stream is replaced: a subclass keeps its constructor,
its collate function, its workers and whatever else it carries. What has no indices is read batch by batch
(batch_stream.py). Several loaders at once are combined.py's.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from typing import Any, NoReturn, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.datapipes.datapipe import IterDataPipe

from trainwright.data.batch_stream import BatchStream, distributed_sampler
from trainwright.data.epoch_listeners import tell_epoch
from trainwright.data.index_stream import IndexStream, in_dataset_order
from trainwright.data.loader_state import StatefulLoader
from trainwright.data.seeding import SideGenerators, derive_seed
from trainwright.data.share import Mode, Place
from trainwright.data.source_state import SourceState, StateLog
from trainwright.data.stated_reader import END
from trainwright.data.stateful_iterable import StatedCollate, StatedStart, StatefulIterable, tells_state
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
    """One rank's share of a loader.

    An IterableDataset is read whole by every rank, which keeps every N-th batch of it: no sample is lost or counted twice,
    and all ranks come to its end together, if it yields the same on every rank. Its generators (python's, numpy's, torch's)
    are seeded alike on all ranks for that. One that splits itself by rank wants `shard=False`. It may be endless.

    Args:
        loader: a DataLoader; on one process, or where `shard` is False, any iterable of batches.
        rank, world_size: whose share.
        mode: "train", "evaluate" or "ghost" (see share.py).
        shard: False where the user has given each rank its own data: all of this rank's loader is used then. A loader with
            a DistributedSampler is taken so by itself.
        in_order: whether shuffling is switched off; a sampler of the user's own keeps its order, with a warning.
        pin_memory: whether batches are to come in pinned memory.

    Raises:
        TypeError: no iterable, or one that several ranks cannot share.
        ValueError: data that cannot be shared out over this many ranks.
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
                f"a loader was expected, but {type(loader).__name__} is no iterable; pass a torch DataLoader, or a list "
                "of batches."
            )
        super().__init__()
        self.loader = loader
        self.world_size, self.rank, self.mode = world_size, rank, mode
        self.is_shared = _is_to_share(loader, world_size, shard)
        """Whether the ranks share one stream; False on one process, and where the user has given each rank its own."""
        if self.is_shared:
            _refuse_what_cannot_be_shared(loader, world_size)
            if rank == 0 and isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
                _say_how_it_is_shared(loader, world_size)
        self.epoch = 0
        self.start_batch = 0
        self.stream: IndexStream | None = None
        self.share: IndexStream | BatchStream
        """Which batches of the loader are this rank's."""
        self._base_seeds: torch.Generator | None = None
        self._with_workers: weakref.WeakSet[Any] = weakref.WeakSet()
        """The iterators whose workers may still run; weak, so that one that is let go of ends its workers at once."""
        self._states: StateLog | None = None
        self._is_training = mode == "train"
        self._goes_on = not in_order
        self.is_read_ahead = False
        """Whether a batch is read before the one before it is done, as where the end is not known beforehand."""
        self._source: Iterable[Any] = self._copied(loader, pin_memory)
        if isinstance(loader, DataLoader) and _has_indices(loader):
            self.share = self.stream = self._with_indices(self._source, loader, in_order)
            self.is_read_ahead = self.stream.source_length is None
        else:
            self.share = self._with_batches(loader, in_order)

    def _copied(self, loader: Iterable[Any], pin_memory: bool) -> Any:
        if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
            if tells_state(loader) and self._is_training:
                self._states = StateLog(loader, None, self.world_size, self._goes_on, self.close)
            return loader
        if loader.num_workers > 0:
            refuse_deep_folder()
        clone = copy.copy(loader)
        # Through __dict__: a DataLoader refuses to have its sampler set, and a subclass may have properties of its own.
        clone.__dict__["_iterator"] = None  # a used persistent loader would go on with its old index stream
        # The workers' base seed is drawn from here: drawn from torch's own generator, an epoch taken up in its middle would
        # leave that one draw ahead of where the uninterrupted run has it.
        clone.__dict__["generator"] = self._base_seeds = torch.Generator()
        if pin_memory:
            clone.__dict__["pin_memory"] = True
        if loader.num_workers > 0 and getattr(loader, "in_order", True) is False:
            clone.__dict__["in_order"] = True  # which batches were had is told by how many they were
            _say_that_order_is_kept()
        is_pipe = isinstance(loader.dataset, IterDataPipe)
        is_stated = isinstance(loader.dataset, IterableDataset) and tells_state(loader.dataset)
        if is_stated and self._is_training and not is_pipe:
            size = loader.batch_size if loader.batch_sampler is not None else None
            dataset = StatefulIterable(loader.dataset, size)
            clone.__dict__["dataset"] = dataset
            if loader.num_workers > 0:
                clone.__dict__["collate_fn"] = StatedCollate(dataset, loader.collate_fn, size, loader.drop_last)
                clone.__dict__["worker_init_fn"] = StatedStart(dataset, loader.worker_init_fn)
            self._states = StateLog(clone, dataset, self.world_size, self._goes_on, self.close)
        elif loader.num_workers > 0 and not is_pipe:
            seeded = SeededIterable if isinstance(loader.dataset, IterableDataset) else SeededDataset
            clone.__dict__["dataset"] = seeded(loader.dataset)
            clone.__dict__["worker_init_fn"] = WorkerStart(loader.dataset, loader.worker_init_fn)
        if loader.num_workers > 0 and not is_pipe:
            clone.__dict__["_get_iterator"] = partial(_begun, weakref.ref(clone), self._with_workers)
        return clone

    def close(self) -> None:
        """End the workers that still run: those that stay for the next epoch, and those of an epoch that was left.

        Left to Python's collection of cycles it would take 5 s a worker: the collector stops the threads that feed the
        workers' queues before torch says goodbye through them.
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
                _warn_of_an_order(type(source.sampler if hasattr(source, "sampler") else source).__name__)
        is_alike = self.is_shared or self.world_size == 1
        stream = IndexStream(
            source, batched=batched, mode=self.mode, seed_rank=self.rank, is_alike=is_alike, **self._place
        )
        stream.gives_seeds = loader.num_workers > 0
        clone.__dict__["batch_sampler" if batched else "sampler"] = stream
        return stream

    def _with_batches(self, loader: Iterable[Any], in_order: bool) -> BatchStream:
        is_loader = isinstance(loader, DataLoader)
        if in_order and is_loader and isinstance(getattr(loader, "sampler", None), RandomSampler):
            _warn_of_an_order(type(loader).__name__)
        read_by_workers = is_loader and self._base_seeds is not None and getattr(loader, "num_workers", 0) > 0
        return BatchStream(
            self._source,
            mode=self.mode,
            seed_rank=0 if self.is_shared else self.rank,
            generator=self._base_seeds,
            draws=not (isinstance(loader, Sequence) or read_by_workers),
            states=self._states,
            **self._place,
        )

    @property
    def _place(self) -> dict[str, int]:
        return {"rank": self.rank, "world_size": self.world_size} if self.is_shared else {"rank": 0, "world_size": 1}

    def begin(
        self, seed: int, epoch: int, start_batch: int, places: Sequence[Place], sources: Sequence[SourceState | None]
    ) -> None:
        """Begin an epoch at a position."""
        self.epoch, self.start_batch = epoch, start_batch
        place, state = next(iter(places), None), next(iter(sources), None)
        if isinstance(self.share, BatchStream):
            if state is not None and state["ranks"] != self.world_size > 1 and not self.is_shared:
                state = None  # of another rank's data
            self.share.set_epoch(seed, epoch, start_batch, place, state)
        else:
            self.share.set_epoch(seed, epoch, start_batch, place)
        if self._base_seeds is not None:
            self._base_seeds.manual_seed(derive_seed(seed, epoch, self.rank))
        tell_epoch(self.loader, epoch)

    def __iter__(self) -> Iterator[Any]:
        self.note_begun()
        if self.stream is None:
            return self.share.items()
        return self._drawn_aside(self.stream) if self._draws_aside else iter(self._source)

    def read_ahead(self) -> None:
        """Expect that a batch is read before the one before it is done: what is drawn for it must not stand in between."""
        self.is_read_ahead = True

    @property
    def _draws_aside(self) -> bool:
        """Return whether each batch is drawn aside: this process fetches it, and too early for the training's generators."""
        return self.stream is not None and self.is_read_ahead and not self.stream.gives_seeds

    def _drawn_aside(self, stream: IndexStream) -> Iterator[Any]:
        """Yield the batches; what is drawn for each is what a worker would draw."""
        batches = iter(self._source)
        for number in count(stream.start_batch):
            with SideGenerators(stream.batch_seed(number)).drawn():
                batch = next(batches, END)
            if batch is END:
                return
            yield batch

    def places(self, batch: int) -> list[Place]:
        """Return where the stream stands after so many batches of this rank in the epoch."""
        return [self.share.place(batch)]

    def source_states(self, places: Sequence[Place], is_over: bool) -> list[SourceState | None]:
        """Return the source's state; None where it has none, or where each epoch begins as the first did."""
        if self._states is None or (is_over and not self._goes_on):
            return [None]
        return [(is_over and self._states.ending()) or self._states.at(places[0])]

    def plan_states(self, batches: Sequence[tuple[int, int]]) -> None:
        """Choose after which batches of this rank the source's state is wanted: an interval, and one of them, each."""
        if isinstance(self.share, BatchStream):
            self.share.plan = batches

    @property
    def starts_beyond(self) -> bool:
        """Return whether the start lies beyond the end of the data."""
        return self.share.starts_beyond

    def note_indices(self) -> deque[list[Any]] | None:
        """Return where the next `iter` notes the dataset's indices of each batch, in the order of the batches.

        Workers read ahead, so it may be some batches ahead too. None where the loader has no indices.
        """
        if self.stream is None:
            return None
        self.stream.noted = deque()
        return self.stream.noted

    @property
    def length(self) -> int | None:
        """Return how many batches this rank has in a whole epoch; None where the loader has no length."""
        return self.share.length

    @property
    def whole_length(self) -> int | None:
        """Return the length of an epoch that is shared out at this world size from its start."""
        return self.share.whole_length

    @property
    def exact_length(self) -> int | None:
        """Return the length where it is certain: that of an index stream or a list, not an estimate of the loader's own."""
        return None if self.share.exact_source_length is None else self.share.length

    @property
    def real_length(self) -> int | None:
        """Return how many of this rank's batches count in an evaluation; None while all that come do."""
        return self.share.real_length

    def __len__(self) -> int:
        length = self.length
        if length is None:
            raise TypeError(f"this {type(self.loader).__name__} has no length.")
        return length

    @property
    def uneven(self) -> Mapping[int, list[int]]:
        """Return, by batch number, the samples that each rank has of a round that is not shared evenly: a live view."""
        return self.share.uneven

    def weight_at(self, index: int) -> float:
        """Return the factor by which this rank's part in the round of a batch differs from an equal one."""
        return weight_of(self.share.uneven.get(index), self.share.rank)

    @property
    def may_read_ahead(self) -> bool:
        """Return whether a batch may be read before the one before it is done, with the same numbers drawn in both."""
        return self.stream is None or self.stream.gives_seeds or self._draws_aside

    @property
    def ends_alike(self) -> bool:
        """Return whether every rank sees the end at the same batch, or can know it beforehand from the lengths."""
        return self.world_size == 1 or self.is_shared or self.exact_length is not None


def weight_of(sizes: list[int] | None, rank: int) -> float:
    """Return a rank's part in the mean of a round that has so many samples on each rank, beside an equal part."""
    return 1.0 if sizes is None else sizes[rank] * len(sizes) / sum(sizes)


class Batches(Protocol):
    """What `with_last` reads: a ShardedLoader, or a combination of them."""

    @property
    def exact_length(self) -> int | None:
        """Return how many batches there are in a whole epoch, where that is certain."""

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
    """Yield (batch, whether it is the last); without a known length one batch is read ahead to tell.

    The loader begins at batch number `start` of `length`; `most` limits the batches where no length is known. Where the
    ranks may end apart (not `ends_alike`), `all_have` is asked with each batch, or at the end, whether every rank has one,
    and the first rank's end is everyone's.

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
    """Say that a loader gives more batches than its length (RuntimeError)."""
    raise RuntimeError(
        f"the loader gives more batches than its length, {length}; let the __len__ of its sampler tell how many it yields."
    )


def _has_indices(loader: DataLoader[Any]) -> bool:
    """Return whether the loader's index stream is ours to replace."""
    return not isinstance(loader.dataset, IterableDataset) and type(loader).__iter__ is DataLoader.__iter__


def _is_to_share(loader: Iterable[Any], world_size: int, shard: bool) -> bool:
    """Return whether the ranks are to share the loader; refuse a DistributedSampler of another job (ValueError)."""
    if world_size == 1 or not shard:
        return False
    sampler = distributed_sampler(loader) if isinstance(loader, DataLoader) else None
    if sampler is not None and sampler.num_replicas != world_size:
        raise ValueError(
            f"the loader's DistributedSampler shares the data by {sampler.num_replicas}, but this job has {world_size} "
            "ranks; leave the sampler out, since loaders are shared anyway, or give it num_replicas of the job."
        )
    return sampler is None


def _refuse_what_cannot_be_shared(loader: Iterable[Any], world_size: int) -> None:
    """Refuse what several ranks cannot share (TypeError)."""
    reason = ""
    if not isinstance(loader, DataLoader):
        reason = f"a {type(loader).__name__} is no DataLoader"
    elif type(loader).__iter__ is not DataLoader.__iter__:
        reason = f"{type(loader).__name__} has an __iter__ of its own"
    if reason:
        raise TypeError(
            f"this loader cannot be shared by {world_size} ranks: {reason}. Pass a torch DataLoader, run on one device, or "
            "give each rank data of its own and set use_distributed_sampler=False (or leave the loader out of prepare)."
        )


def _say_how_it_is_shared(loader: DataLoader[Any], world_size: int) -> None:
    """Warn: a dataset that splits itself by rank would be split twice, which nothing else would show."""
    warnings.warn(
        f"a {type(loader.dataset).__name__} is an IterableDataset: each of the {world_size} ranks reads it whole and keeps "
        f"one batch in {world_size}. If it splits itself by rank, set use_distributed_sampler=False (or leave its loader out "
        "of prepare).",
        stacklevel=2,
    )


def _say_that_order_is_kept() -> None:
    rank_zero_warn(
        "the loader has in_order=False, which is not heeded: batches come in the order in which they were drawn, so that a run "
        "can resume within an epoch and predictions stand in the order of the dataset.",
        stacklevel=2,
    )


def _warn_of_an_order(kind: str) -> None:
    warnings.warn(
        f"overfit_batches is for the same batches each epoch, but the loader's {kind} chooses an order of its own, which is "
        "kept; give the loader a sampler whose order does not change, or shuffle=True, which is switched off.",
        stacklevel=2,
    )
