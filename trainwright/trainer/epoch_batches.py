"""Batches as a loop takes them: read ahead to know the last, and copied to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch

from trainwright.data.loaders import with_last
from trainwright.data.transfer import Prefetcher
from trainwright.engine.engine import Engine
from trainwright.trainer.sources import BatchTransfer
from trainwright.trainer.stop import Stop
from trainwright.trainer.training_data import TrainData

Pairs = Iterator[tuple[Any, bool]]
"""Batches, each with whether it is the last."""


@dataclass(slots=True)
class Batch:
    """One batch: the arguments of its step, the value that hooks get, and its position in the epoch."""

    arguments: tuple[Any, ...]
    """The positional arguments of the step. Empty for a batch that is None, which is skipped."""
    value: Any
    """The batch on its device."""
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


class EpochBatches:
    """The batches of a training epoch, or of the rest of it, from the run's position on.

    The only class that knows how the loop's last batch is recognized, how batches reach the device, and whether the run stops
    before the first. Collective: each rank iterates.

    Args:
        data: this rank's shard, which has begun the epoch.
        num_arguments: how many of the batch and its index training_step takes.
        transfer: moves a batch to the device; None if batches need no change.
        watch: wraps the iterator of batches, to measure the wait for them.
        stop: is asked whether the run stops before the first batch.
    """

    def __init__(
        self,
        data: TrainData,
        num_arguments: int,
        transfer: BatchTransfer | None,
        engine: Engine,
        watch: Callable[[Pairs], Pairs],
        stop: Stop,
    ) -> None:
        self._data, self._engine, self._stop = data, engine, stop
        self._num_arguments, self._transfer = num_arguments, transfer
        self._start, self._length, loader = data.state.batch, data.num_batches, data.loader
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
        if self._engine.num_data_ranks == 1:
            return has_batch
        # NOTE: waits for the device at each batch; with a length, or sharded loaders, it is not called.
        return bool(self._engine.reduce(torch.tensor([int(has_batch)]), "min").item())

    def __iter__(self) -> Iterator[Batch]:
        self._stop.agree()
        if self._stop.is_due():
            return
        transfer, count, length, loader = self._transfer, self._num_arguments, self._length, self._data.loader
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

    def _refuse_short(self) -> None:
        """Reject a loader that yielded no batches, or fewer than its length (RuntimeError)."""
        count = self._data.state.batch
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
