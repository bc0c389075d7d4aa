"""Loaders: a user's DataLoader with this rank's share of its samples, in an order that is known beforehand.

The user's loader is copied, never built anew, and only its index stream is replaced: a subclass keeps its constructor,
its collate function, its workers and whatever else it carries.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from trainwright.data.index_stream import IndexStream, Mode
from trainwright.data.seeding import derive_seed
from trainwright.data.workers import SeededDataset, WorkerStart


class ShardedLoader:
    """One rank's share of a loader.

    Args:
        loader: a DataLoader over a map-style dataset; on one process any iterable of batches.
        rank, world_size: whose share.
        mode: "train", "evaluate", "ghost" or "even" (see index_stream.py).

    Raises:
        TypeError: no iterable, or one that several ranks cannot share.
        ValueError: data that cannot be shared out over this many ranks.
    """

    def __init__(self, loader: Iterable[Any], *, rank: int, world_size: int, mode: Mode) -> None:
        if not isinstance(loader, Iterable):
            raise TypeError(
                f"a loader was expected, but {type(loader).__name__} is no iterable; pass a torch DataLoader, or a list "
                "of batches."
            )
        self.loader = loader
        self.world_size, self.rank, self.mode = world_size, rank, mode
        self.epoch = 0
        self.start_batch = 0
        self.stream: IndexStream | None = None
        self._source: Iterable[Any] = loader
        if _replaceable(loader, world_size):
            assert isinstance(loader, DataLoader)
            self._source = self._with_stream(loader)

    def _with_stream(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        batched = loader.batch_sampler is not None
        source = loader.batch_sampler if batched else loader.sampler
        self.stream = IndexStream(source, batched=batched, rank=self.rank, world_size=self.world_size, mode=self.mode)
        clone = copy.copy(loader)
        if loader.num_workers > 0:
            self.stream.gives_seeds = True
            clone.__dict__["dataset"] = SeededDataset(loader.dataset)
            clone.__dict__["worker_init_fn"] = WorkerStart(loader.dataset, loader.worker_init_fn)
        # Through __dict__: a DataLoader refuses to have its sampler set, and a subclass may have properties of its own.
        clone.__dict__["batch_sampler" if batched else "sampler"] = self.stream
        clone.__dict__["_iterator"] = None  # a used persistent loader would go on with its old index stream
        # The workers' base seed is drawn from here: drawn from torch's own generator, an epoch taken up in its middle would
        # leave that one draw ahead of where the uninterrupted run has it.
        clone.__dict__["generator"] = self._base_seeds = torch.Generator()
        return clone

    def set_epoch(self, seed: int, epoch: int, start_batch: int = 0) -> None:
        """Choose the order of the next `iter`, a function of seed and epoch, and the batch that it starts with."""
        self.epoch, self.start_batch = epoch, start_batch
        if self.stream is not None:
            self.stream.set_epoch(seed, epoch, start_batch)
            self._base_seeds.manual_seed(derive_seed(seed, epoch, self.rank))
            return
        if isinstance(self.loader, DataLoader) and (sampler := _distributed_sampler(self.loader)) is not None:
            sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._source)
        if self.stream is None and self.start_batch:
            return islice(batches, self.start_batch, None)
        return batches

    @property
    def length(self) -> int | None:
        """Return how many batches this rank has in a whole epoch; None where the loader has no length."""
        try:
            return len(self.stream if self.stream is not None else self._source)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    @property
    def exact_length(self) -> int | None:
        """Return the length where it is certain: that of an index stream or a list, not an estimate of the loader's own."""
        return self.length if self.stream is not None or isinstance(self.loader, Sequence) else None

    @property
    def real_length(self) -> int | None:
        """Return how many of this rank's batches count in an evaluation; None where all that come do."""
        return None if self.stream is None or self.length is None else self.stream.real_length

    def __len__(self) -> int:
        length = self.length
        if length is None:
            raise TypeError(f"this {type(self.loader).__name__} has no length.")
        return length

    @property
    def last_weight(self) -> float:
        """Return the factor by which this rank's part in the last round differs from an equal one."""
        return self.stream.last_weight if self.stream is not None else 1.0

    @property
    def last_sizes(self) -> list[int] | None:
        """Return, per rank, how many samples of the last round are no repeats; None where all are."""
        return self.stream.real_sizes if self.stream is not None else None


def with_last(
    loader: ShardedLoader, start: int, length: int | None, most: int | None = None
) -> Iterator[tuple[Any, bool]]:
    """Yield (batch, whether it is the last); without a known length one batch is read ahead to tell.

    The loader begins at batch number `start` of `length`; `most` limits the batches where no length is known.

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
    try:
        held = next(batches)
    except StopIteration:
        return
    for batch in batches:
        yield held, False
        held = batch
    yield held, True


def refuse_length(length: int) -> NoReturn:
    """Say that a loader gives more batches than its length (RuntimeError)."""
    raise RuntimeError(
        f"the loader gives more batches than its length, {length}; let the __len__ of its sampler tell how many it yields."
    )


def _distributed_sampler(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    """Return the DistributedSampler that the user gave the loader, within a batch sampler too."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


def _replaceable(loader: Iterable[Any], world_size: int) -> bool:
    """Return whether the loader's index stream is ours to replace; refuse what several ranks cannot share (TypeError)."""
    reason = ""
    if not isinstance(loader, DataLoader):
        reason = f"a {type(loader).__name__} is no DataLoader"
    elif isinstance(loader.dataset, IterableDataset):
        reason = "its dataset is an IterableDataset, which has no indices"
    elif type(loader).__iter__ is not DataLoader.__iter__:
        reason = f"{type(loader).__name__} has an __iter__ of its own"
    elif (sampler := _distributed_sampler(loader)) is not None:
        if sampler.num_replicas != world_size:
            raise ValueError(
                f"the loader's DistributedSampler shares the data by {sampler.num_replicas}, but this job has {world_size} "
                "ranks; leave the sampler out, since loaders are shared anyway, or give it num_replicas of the job."
            )
        return False  # sharded already, by the user
    if reason and world_size > 1:
        raise TypeError(
            f"this loader cannot be shared by {world_size} ranks: {reason}. Pass a torch DataLoader over a map-style "
            "dataset, or run on one device."
        )
    return not reason
