"""Workers: what a loader's workers draw for a batch is a function of (seed, epoch, batch), and they leave nothing behind.

Without it a worker draws on from batch to batch, so that random augmentation would differ after a resume, and with
another number of workers. The index stream gives each batch of indices a seed, and the dataset that the workers see
seeds their generators with it. An iterable dataset has no indices: its workers are seeded at the beginning of each pass.
The user's own dataset is what `get_worker_info().dataset` shows.
"""

from __future__ import annotations

import multiprocessing.util
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from trainwright.data.seeding import derive_seed


class SeededBatch(list[Any]):
    """The indices of one batch, with its seed."""

    def __init__(self, indices: Iterable[Any], seed: int = 0) -> None:
        super().__init__(indices)
        self.seed = seed


class SeededIndex(NamedTuple):
    """One index of a loader that makes no batches, with its seed."""

    index: Any
    seed: int


class SeededDataset(Dataset[Any]):
    """A dataset whose items are fetched by seeded indices."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, seeded: SeededIndex) -> Any:
        seed_generators(seeded.seed)
        return self.dataset[seeded.index]

    def __getitems__(self, batch: SeededBatch) -> list[Any]:
        """Fetch a batch, through the dataset's own `__getitems__` where it has one."""
        seed_generators(batch.seed)
        indices = list(batch)
        fetch = getattr(self.dataset, "__getitems__", None)
        return list(fetch(indices)) if callable(fetch) else [self.dataset[index] for index in indices]


class SeededIterable(IterableDataset[Any]):
    """An iterable dataset, each pass of which begins with seeded generators in the worker that reads it.

    The seed lies in shared memory, since a persistent worker has its copy of the dataset from its first epoch.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._seed: torch.Tensor = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def set_seed(self, seed: int) -> None:
        """Choose the seed of the next pass, before it begins."""
        self._seed.fill_(seed)

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        seed_generators(derive_seed(int(self._seed), info.id if info is not None else 0))
        return iter(self.dataset)


class WorkerStart:
    """The worker_init_fn of a seeded loader: it shows the user's dataset, then calls the user's own function."""

    def __init__(self, dataset: Any, init: Callable[[int], Any] | None) -> None:
        self.dataset, self.init = dataset, init

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", self.dataset)  # a WorkerInfo's own __setattr__ refuses
        signal.signal(signal.SIGTERM, leave_tidily)
        if self.init is not None:
            self.init(worker_id)


def leave_tidily(signal_number: int, frame: object) -> None:
    """End a worker on a signal, its temporary folder removed; by itself it would be left behind."""
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    os._exit(128 + signal_number)


def seed_generators(seed: int) -> None:
    """Seed the generators of this process: python's, numpy's where it is loaded, torch's on the CPU."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would look at every device, 200 times slower
