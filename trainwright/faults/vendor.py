"""Private names of torch's iterator over a DataLoader with workers (torch 2.11 to 2.13), and of multiprocessing."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from trainwright.faults.lost_workers import Worker, WorkerGrowth, WorkerWait, describe_end, out_of_memory_kills

_watched: weakref.WeakKeyDictionary[Any, WatchedWorkers] = weakref.WeakKeyDictionary()


@contextmanager
def one_folder() -> Iterator[str]:
    """Make the processes that start in the block share a new temporary folder, since a killed one would leave its own."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = config.get("tempdir")
    folder = config["tempdir"] = tempfile.mkdtemp(prefix="pymp-")
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        config["tempdir"] = before


def remove_if_last(parent: int) -> None:
    """In a worker, remove the folder at the worker's end if the parent has ended and no other worker uses the folder."""

    def remove() -> None:
        if os.getppid() != parent:
            with suppress(OSError):
                os.rmdir(multiprocessing.util.get_temp_dir())

    multiprocessing.util.Finalize(None, remove, exitpriority=-101)


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not a forked child
        shutil.rmtree(folder, ignore_errors=True)


class WatchedWorkers:
    """The workers of one iterator over a loader."""

    def __init__(self, iterator: Any, loader: DataLoader[Any]) -> None:
        # Weakly, because a cycle would keep the workers alive until its collection.
        self._iterator: Callable[[], Any] = weakref.ref(iterator)
        self._stream: Any = loader.batch_sampler or loader.sampler
        self._dataset = type(getattr(loader.dataset, "dataset", loader.dataset)).__name__
        self._has_timeout, self._wait, self._growth = loader.timeout > 0, WorkerWait(), WorkerGrowth()

    def workers(self) -> list[Worker]:
        """Return the workers with the batches that they have not delivered."""
        iterator = self._iterator()
        if iterator is None:
            return []
        recent, first = dict(getattr(self._stream, "recent", ())), getattr(self._stream, "start_batch", 0)
        tasks = sorted((task, info[0]) for task, info in iterator._task_info.items() if len(info) == 1)
        workers = []
        for number, process in enumerate(iterator._workers):
            batches = {first + task: recent.get(first + task, ()) for task, owner in tasks if owner == number}
            workers.append(Worker(number, process, self._dataset, batches))
        return workers

    def check_growth(self) -> None:
        """Warn if the memory of a worker has grown much since the first call."""
        self._growth.check(self.workers())

    def _try_get_data(self, timeout: float = 5.0) -> tuple[bool, Any]:
        iterator = self._iterator()
        try:
            result: tuple[bool, Any] = type(iterator)._try_get_data(iterator, timeout)
        except RuntimeError as error:
            raise RuntimeError(describe_end(str(error), self.workers())) from error
        if not result[0]:
            worker = min(self.workers(), key=lambda worker: min(worker.batches, default=float("inf")))
            if self._has_timeout:
                work = f"{worker}, which reads {worker.work()}"
                raise RuntimeError(f"DataLoader timed out after {timeout} seconds: it waits for {work}.")
            self._wait.go_on(timeout, worker)
        return result


def watch_workers(iterator: Any, loader: DataLoader[Any], folder: str) -> None:
    """Name the workers of an iterator in the errors of torch, and in a warning if training waits for one for long.

    Their folder ends with the iterator.
    """
    weakref.finalize(iterator, _remove, folder, os.getpid())
    if hasattr(iterator, "_task_info"):  # another package's iterator has none
        out_of_memory_kills()
        watched = _watched[iterator] = WatchedWorkers(iterator, loader)
        vars(iterator)["_try_get_data"] = watched._try_get_data
        _name_killed_workers()


def check_growth(iterators: Iterable[Any]) -> None:
    """Warn if the memory of workers has grown much since the first call."""
    for iterator in iterators:
        if (watched := _watched.get(iterator)) is not None:
            watched.check_growth()


def _name_killed_workers() -> None:
    """Add the workers to the error that torch's handler raises in the main thread when one of them is killed."""
    previous = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or getattr(previous, "func", None) is _on_child:
        return
    if callable(previous):
        signal.signal(signal.SIGCHLD, partial(_on_child, previous))


def _on_child(previous: Callable[[int, FrameType | None], object], number: int, frame: FrameType | None) -> None:
    try:
        previous(number, frame)
    except RuntimeError as error:
        workers = [worker for watched in list(_watched.values()) for worker in watched.workers()]
        raise RuntimeError(describe_end(str(error), workers)) from error
