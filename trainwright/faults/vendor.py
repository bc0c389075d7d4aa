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

from trainwright.faults.lost_workers import Worker, WorkerGrowth, WorkerWait, describe_end, out_of_memory_kills

_watched: weakref.WeakKeyDictionary[Any, WorkerGrowth] = weakref.WeakKeyDictionary()


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


def watch_workers(iterator: Any, folder: str) -> None:
    """Name the workers of an iterator in the errors of torch, and in a warning if training waits for one for long.

    Their folder ends with the iterator.
    """
    weakref.finalize(iterator, _remove, folder, os.getpid())
    if hasattr(iterator, "_task_info"):  # another package's iterator has none
        out_of_memory_kills()
        # Weakly, because the cycle would keep the workers alive until its collection.
        vars(iterator)["_try_get_data"] = partial(_try_get_data, weakref.ref(iterator), WorkerWait())
        _watched[iterator] = WorkerGrowth()
        _name_killed_workers()


def _try_get_data(find: Callable[[], Any], wait: WorkerWait, timeout: float = 5.0) -> tuple[bool, Any]:
    iterator = find()
    try:
        result: tuple[bool, Any] = type(iterator)._try_get_data(iterator, timeout)
    except RuntimeError as error:
        raise RuntimeError(describe_end(str(error), workers_of(iterator))) from error
    if not result[0]:
        batch = iterator._rcvd_idx
        worker = workers_of(iterator)[iterator._task_info[batch][0]]
        if iterator._timeout > 0:
            work = f"{worker}, which reads {worker.work()}"
            raise RuntimeError(f"DataLoader timed out after {timeout} seconds: it waits for {work}.")
        wait.go_on(batch, timeout, worker)
    return result


def workers_of(iterator: Any) -> list[Worker]:
    """Return the workers of an iterator with the batches that they read."""
    tasks, sent, stream = iterator._task_info, iterator._send_idx, iterator._index_sampler
    recent, first = list(getattr(stream, "recent", ())), getattr(stream, "start_batch", 0)
    dataset = getattr(iterator._dataset, "dataset", iterator._dataset)
    workers = []
    for number, process in enumerate(iterator._workers):
        numbers = sorted(task for task, (owner, *data) in tasks.items() if owner == number and not data)
        batches = {first + task: recent[task - sent] if sent - task <= len(recent) else () for task in numbers}
        workers.append(Worker(number, process, type(dataset).__name__, batches))
    return workers


def check_growth(iterators: Iterable[Any]) -> None:
    """Warn if the memory of workers has grown much since the first call."""
    for iterator in iterators:
        if (growth := _watched.get(iterator)) is not None:
            growth.check(workers_of(iterator))


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
        workers = [worker for iterator in list(_watched) for worker in workers_of(iterator)]
        raise RuntimeError(describe_end(str(error), workers)) from error
