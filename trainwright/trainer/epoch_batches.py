"""Batches as a loop takes them: read ahead to know the last, copied to the device, or pulled by the step itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch

from trainwright.data.loaders import with_last
from trainwright.data.transfer import Prefetcher
from trainwright.engine.engine import Engine
from trainwright.trainer.logbook import Logbook
from trainwright.trainer.sources import BatchTransfer, StepArguments
from trainwright.trainer.training_data import TrainData

Pairs = Iterator[tuple[Any, bool]]
"""Batches, each with whether it is the last."""


@dataclass(slots=True)
class Batch:
    """One batch: the arguments of its step, the value that hooks get, and its position in the epoch."""

    arguments: tuple[Any, ...]
    """The positional arguments of the step. Empty for a batch that is None, which is skipped."""
    value: Any
    """The batch on its device. None until a step that pulls its batches has taken one."""
    index: int
    is_last: bool = False
    batches_left: int | None = None
    """Batches from this one to the epoch's end. None if the epoch's length is unknown."""
    is_uneven: bool = False
    """Whether ranks may have different numbers of samples."""
    weight: float = 1.0
    """This rank's samples, relative to an equal part of the round."""
    is_dummy: bool = False
    """Whether this rank has no sample, and only keeps collectives in step with other ranks."""
    is_taken: bool = True
    """False until a step that pulls its batches has taken one."""

    def refuse(self, step: str) -> None:
        """Raise RuntimeError: the step should have taken its batch itself, and has not."""
        raise RuntimeError(f"{step} took no batch from its dataloader_iter. Call next(dataloader_iter) in it.")


class PulledBatches(Iterator[tuple[Any, int, int]]):
    """The batches of a step with a `dataloader_iter` argument, as tuples of (batch, batch_idx, dataloader_idx).

    Args:
        batches: pairs of a batch and whether it is the last.
        transfer: moves a batch to the device; None if batches need no change.
        start: the number of the first batch.
        outside: a context without the step's precision, in which loaders compute as they do before a step.
        weight_of: this rank's weight in the round of a batch, by its number.
    """

    def __init__(
        self,
        batches: Pairs,
        transfer: BatchTransfer | None,
        start: int,
        logbook: Logbook,
        outside: Callable[[], AbstractContextManager[Any]],
        weight_of: Callable[[int], float],
    ) -> None:
        self._batches, self._transfer, self._logbook, self._outside = batches, transfer, logbook, outside
        self._weight_of = weight_of
        self.count = start
        """The number of the epoch's batches that were taken."""
        # One batch is read ahead, to know whether the one before is the last.
        self._ahead: tuple[Any, bool] | None = next(batches, None)
        self.is_at_end = self._ahead is None
        self.batch = Batch((self,), None, start)
        """The batch of the running step."""

    def begin_step(self) -> Batch:
        """Return the batch of another step, which the step moves on as it takes batches."""
        is_last = self._ahead is not None and self._ahead[1]
        weight = self._weight_of(self.count)
        self.batch = Batch((self,), None, self.count, is_last, weight=weight, is_taken=False)
        return self.batch

    def __next__(self) -> tuple[Any, int, int]:
        batch = self.batch
        if self._ahead is None:
            raise StopIteration
        value, is_last = self._ahead
        with self._outside():
            self._ahead = None if is_last else next(self._batches, None)
            batch.value = value if self._transfer is None else self._transfer(value)
        batch.is_last = self.is_at_end = self._ahead is None
        batch.index, batch.weight, batch.is_taken = self.count, self._weight_of(self.count), True
        self.count += 1
        if (collector := self._logbook.collector) is not None:  # self.log finds the batch size in the batch
            collector.begin_batch(batch.value, collector.hook, collector.is_uneven)
        return batch.value, batch.index, 0


class EpochBatches:
    """The batches of a training epoch, or of the rest of it, from the run's position on.

    The only class that knows how the loop's last batch is recognized, how batches reach the device, whether training_step pulls
    them itself, and whether the run stops before the first. Collective: each rank iterates.

    Args:
        data: this rank's shard, which has begun the epoch.
        arguments: the arguments of training_step.
        transfer: moves a batch to the device; None if batches need no change.
        watch: wraps the iterator of batches, to measure the wait for them.
        is_stopped: collective; whether the run stops before the first batch.
    """

    def __init__(
        self,
        data: TrainData,
        arguments: StepArguments,
        transfer: BatchTransfer | None,
        engine: Engine,
        logbook: Logbook,
        watch: Callable[[Pairs], Pairs],
        is_stopped: Callable[[], bool],
    ) -> None:
        self._data, self._engine, self._logbook, self._is_stopped = data, engine, logbook, is_stopped
        self._arguments, self._transfer = arguments, transfer
        self._start, self._length, loader = data.position, data.num_batches, data.loader
        # A loader that belongs to a single rank may end before the loaders of other ranks.
        all_have = self._all_have if self._length is None and not loader.ends_together else None
        pairs = with_last(loader, self._start, self._length, data.most_batches, all_have=all_have)
        self._latest: Batch | None = None
        self._is_over = self._length is not None and self._start >= self._length
        """Whether no batch is left. If the length is unknown, the loader must be read to find out."""
        if self._length is None and self._start:
            first = list(islice(pairs, 1))
            pairs, self._is_over = chain(first, pairs), not first
        self._pairs = watch(pairs)

    @property
    def is_complete(self) -> bool:
        """Return whether the epoch has no batch left after the latest one."""
        return self._is_over or (self._latest is not None and self._latest.is_last)

    def _all_have(self, has_batch: bool) -> bool:
        """Return whether every rank still has a batch. Collective: call on every rank."""
        if self._engine.world_size == 1:
            return has_batch
        # NOTE: waits for the device at each batch; with a length, or sharded loaders, it is not called.
        return bool(self._engine.reduce(torch.tensor([int(has_batch)]), "min").item())

    def __iter__(self) -> Iterator[Batch]:
        # Not a generator itself, which would be one more call for each batch.
        return self._pulled() if self._arguments.pulls else self._handed()

    def _handed(self) -> Iterator[Batch]:
        """Yield the batches that the loop hands to training_step."""
        if self._is_stopped():
            return
        transfer, count, length, loader = (
            self._transfer,
            self._arguments.count,
            self._length,
            self._data.loader,
        )
        pairs: Pairs = self._pairs
        move: Callable[[Any], Any] | None = transfer
        if transfer is not None and transfer.may_go_ahead:
            pairs, move = iter(Prefetcher(pairs, self._engine.device, ahead=loader.may_read_ahead)), transfer.arrived
        for index, (value, is_last) in enumerate(pairs, start=self._start):
            value = value if move is None else move(value)
            arguments = () if value is None else (value, index)[:count]
            self._latest = batch = Batch(arguments, value, index, is_last, None if length is None else length - index)
            if index in loader.uneven:
                batch.is_uneven, batch.weight = True, loader.weight_at(index)
                batch.is_dummy = batch.weight == 0.0
            yield batch
        self._refuse_short()
        self._is_over = True

    def _pulled(self) -> Iterator[Batch]:
        """Yield a batch for each training_step that takes its batches itself."""
        if self._is_stopped():
            return
        loader, outside = self._data.loader, self._engine.precision.step_context
        pulled = PulledBatches(
            self._pairs, self._transfer, self._start, self._logbook, outside, weight_of=loader.weight_at
        )
        while not pulled.is_at_end:
            self._latest = batch = pulled.begin_step()
            if self._length is not None:
                batch.batches_left = self._length - batch.index
            if batch.index in loader.uneven:
                batch.is_uneven, batch.is_dummy = True, batch.weight == 0.0
            yield batch
        self._refuse_short()
        self._is_over = True

    def _refuse_short(self) -> None:
        """Reject a loader that yielded no batches, or fewer than its length (RuntimeError)."""
        count = self._data.position
        if self._length is None and count == 0:
            raise RuntimeError(
                "the training loader yielded no batches (its dataset yields nothing, drop_last dropped all, or its __iter__ "
                "does not start again in a later epoch). Give it data."
            )
        if self._length is not None and not self.is_complete:
            raise RuntimeError(
                f"the training loader yielded {count} batches, but its length is {self._length}. Make the __len__ of its "
                "sampler the number of batches that it yields."
            )
