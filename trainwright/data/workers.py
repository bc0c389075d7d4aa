"""Workers: their random numbers depend on (seed, epoch, batch) only, and they end without leftovers.

torch's workers do not reseed between batches. So random augmentation would differ after a resume and with another number of
workers. Therefore the index stream adds a seed to every batch of indices, and the dataset in the worker seeds its generators
with it. An iterable dataset has no indices, so its workers are seeded at the start of every pass. `get_worker_info().dataset`
still returns the user's dataset.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    get_worker_info,
)

from trainwright.data.seeding import derive_seed, seed_generators
from trainwright.data.vendor import is_loop_done, is_split_after_shuffle
from trainwright.distributed.signals import STOP_SIGNALS

PR_SET_PDEATHSIG = 1


class SeededBatch(list[Any]):
    """The indices of one batch, with its seed and epoch."""

    def __init__(self, indices: Iterable[Any], seed: int = 0, epoch: int = 0) -> None:
        super().__init__(indices)
        self.seed, self.epoch = seed, epoch


class SeededIndex(NamedTuple):
    """One index of a loader without batching, with its seed and epoch."""

    index: Any
    seed: int
    epoch: int


class SeededDataset(Dataset[Any]):
    """A dataset whose items are fetched by seeded indices. They carry the epoch to the worker's copy of the dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._epoch: int | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, seeded: SeededIndex) -> Any:
        self._begin(seeded)
        return self.dataset[seeded.index]

    def __getitems__(self, batch: SeededBatch) -> list[Any]:
        """Fetch a batch, through the dataset's `__getitems__` if it has this method."""
        self._begin(batch)
        fetch = getattr(self.dataset, "__getitems__", None)
        return list(fetch(list(batch))) if callable(fetch) else [self.dataset[index] for index in batch]

    def _begin(self, fetched: SeededBatch | SeededIndex) -> None:
        if fetched.epoch != self._epoch:
            self._epoch = fetched.epoch
            set_epoch_of(self.dataset, fetched.epoch)
        seed_generators(fetched.seed)


def shared_integers(count: int) -> torch.Tensor:
    """Return zeros in shared memory, through which values reach workers that already run."""
    zeros: torch.Tensor = torch.zeros(count, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
    return zeros


class SeededIterable(IterableDataset[Any]):
    """An iterable dataset whose passes start with `set_epoch` and seeded generators in the worker that reads it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._pass = shared_integers(2)

    def set_pass(self, seed: int, epoch: int) -> None:
        self._pass[0], self._pass[1] = seed, epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        set_epoch_of(self.dataset, int(self._pass[1]))
        seed_generators(derive_seed(int(self._pass[0]), info.id if info is not None else 0))
        return iter(self.dataset)


class WorkerStart:
    """The worker_init_fn of a seeded loader. It puts the user's dataset into the worker info and calls the user's function."""

    def __init__(self, dataset: Any, init: Callable[[int], Any] | None) -> None:
        self.dataset, self.init = dataset, init

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", self.dataset)  # WorkerInfo.__setattr__ raises an error
        hear_signals()
        if self.init is not None:
            self.init(worker_id)


def hear_signals() -> None:
    """Make this worker survive a signal to its process group, and end when its parent has ended, in whatever way.

    Ctrl-C, torchrun and SLURM signal every process of a group, but a run that stops on a signal still reads to the end of a
    step. So SIGTERM ends a worker only if its parent needs no more batches, or has ended.
    """
    parent = os.getppid()

    def leave_if_done(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent or is_loop_done(frame):
            # A second signal would interrupt the removal of temporary files. Python reports one that is already recorded
            # when its handler becomes SIG_IGN, so the handler is a function.
            for other in STOP_SIGNALS:
                signal.signal(other, lambda *_: None)
            sys.exit(128 + number)

    for number in STOP_SIGNALS:
        signal.signal(number, leave_if_done)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl was called
        sys.exit(128 + signal.SIGTERM)


def set_epoch_of_parts(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of the loader, its dataset, its samplers and their contents. Workers call it for their copies."""
    parts = [loader, getattr(loader, "dataset", None)]
    for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        while sampler is not None:
            parts.append(sampler)
            sampler = getattr(sampler, "sampler", None)
    for part in {id(part): part for part in parts}.values():
        set_epoch_of(part, epoch)


def set_epoch_of(listener: object, epoch: int) -> None:
    """Call `set_epoch` of an object, if it has this method, and of the datasets in torch's datasets."""
    if callable(set_epoch := getattr(listener, "set_epoch", None)) and not is_split_after_shuffle(listener):
        set_epoch(epoch)
    within: Any = ()
    if isinstance(listener, Subset):  # also from random_split
        within = (listener.dataset,)
    elif isinstance(listener, (ConcatDataset, ChainDataset, StackDataset)):
        within = listener.datasets
    within = within.values() if isinstance(within, Mapping) else within
    if isinstance(within, Collection):  # not a ChainDataset's generator of datasets, which only reading may consume
        for dataset in within:
            set_epoch_of(dataset, epoch)
