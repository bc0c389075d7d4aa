"""Loader workers that are killed, hang or leak, by private names of torch 2.11 to 2.13 and of multiprocessing."""

from __future__ import annotations

import multiprocessing.util
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from trainwright.faults.out_of_memory import OutOfMemoryKills
from trainwright.rank_zero import warn

LONG_WAIT_SECONDS = 60.0
"""A wait for one batch that is worth a warning."""
GROWTH_BYTES, GROWTH_FACTOR = 1 << 30, 3
"""The growth of a worker's memory since its first epoch that is worth a warning: both."""
CHECK_SECONDS = 60.0  # between two looks at the memory, which take the kernel some ms per worker
MOST_BATCHES, MOST_INDICES = 2, 8  # in a message
kills = cache(OutOfMemoryKills)  # since the first worker began


class WatchedWorkers:
    """The workers of one iterator over a loader."""

    def __init__(self, iterator: Any, loader: DataLoader[Any]) -> None:
        # Weakly, because a cycle would keep the workers alive until its collection.
        self._iterator: Callable[[], Any] = weakref.ref(iterator)
        # Not by truth: a batch sampler of a stream has a __len__ that raises.
        self._stream: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._dataset = type(getattr(loader.dataset, "dataset", loader.dataset)).__name__
        self._has_timeout, self._waited, self._latest = loader.timeout > 0, 0.0, -1
        self._memory: dict[int, int] = {}
        self._due = 0.0

    def describe(self, number: int) -> str:
        """Return a worker in words, with the batches that it has not delivered."""
        iterator = self._iterator()
        recent, first = dict(getattr(self._stream, "recent", ())), getattr(self._stream, "start_batch", 0)
        texts = []
        for batch in sorted(first + task for task, info in iterator._task_info.items() if info == (number,))[
            :MOST_BATCHES
        ]:
            indices = list(recent.get(batch, ()))
            shown = ", ".join(map(repr, indices[:MOST_INDICES])) + ", ..." * (len(indices) > MOST_INDICES)
            texts.append(f"batch {batch} of the epoch" + f" (indices {shown})" * bool(shown))
        has_not = f", which has not delivered {' and '.join(texts)}" if texts else ""
        return f"worker {number} (pid {iterator._workers[number].pid}) of the loader of {self._dataset}{has_not}"

    def explain(self, error: RuntimeError) -> RuntimeError:
        """Return an error of torch about ended workers with their descriptions."""
        text = str(error).strip().rstrip(".")
        # The handler of torch may have raised it within the call that raises it again.
        found = None if ". It is worker " in text else re.search(r"\(pid(?:\(s\))? ([\d, ]+)\)", text)
        for number, worker in enumerate(getattr(self._iterator(), "_workers", ()) if found else ()):
            if str(worker.pid) in found[1].split(", "):  # type: ignore[index]
                code = worker.exitcode or 0
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                if code == -signal.SIGKILL:
                    how += kills().describe() or "; on Linux this is often the out-of-memory killer"
                text = f"{text}. It is {self.describe(number)}: {how}"
        return RuntimeError(f"{text}.")

    def _try_get_data(self, timeout: float = 5.0) -> tuple[bool, Any]:
        iterator = self._iterator()
        try:
            result: tuple[bool, Any] = type(iterator)._try_get_data(iterator, timeout)
        except RuntimeError as error:
            raise self.explain(error) from error
        if not result[0]:
            self._wait(min((task, info[0]) for task, info in iterator._task_info.items() if len(info) == 1), timeout)
        return result

    def _wait(self, task: tuple[int, int], seconds: float) -> None:
        """Warn once of a task that has taken these seconds more."""
        before = self._waited if task[0] == self._latest else 0.0
        self._latest, self._waited = task[0], before + seconds
        text = f"training has waited {self._waited:.0f} s for {self.describe(task[1])}"
        if self._has_timeout:
            raise RuntimeError(f"DataLoader timed out after {seconds} seconds: {text}.")
        if before < LONG_WAIT_SECONDS <= self._waited:
            pid = self._iterator()._workers[task[1]].pid
            warn(
                f"{text}. It waits on. `py-spy dump --pid {pid}` shows where the worker is, and the DataLoader's "
                "timeout=... makes such a wait an error."
            )

    def check_memory(self) -> None:
        """Warn once of each worker whose memory has grown since the first call."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + CHECK_SECONDS
        for number, worker in enumerate(getattr(self._iterator(), "_workers", ())):
            now = private_bytes(worker.pid)
            first = self._memory.setdefault(number, now)
            if first > 0 and now > max(first + GROWTH_BYTES, GROWTH_FACTOR * first):
                self._memory[number] = 0
                warn(
                    f"the memory of {self.describe(number)} has grown from {first >> 20} to {now >> 20} MiB since its first "
                    "epoch. Usually the dataset keeps items, or has many Python objects, whose reference counts every worker "
                    "copies: store the data in arrays or tensors, or pass persistent_workers=False."
                )


_watched: weakref.WeakKeyDictionary[Any, WatchedWorkers] = weakref.WeakKeyDictionary()


def private_bytes(pid: int) -> int:
    """Return the memory that only this process uses, or 0 if it is unknown."""
    with suppress(OSError):  # another system, or the process has ended
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return sum(int(size) << 10 for size in re.findall(r"Private_\w+: +(\d+) kB", text))
    return 0


@contextmanager
def one_folder() -> Iterator[str]:
    """Make the processes that start in the block share a new temporary folder, since a killed one would leave its own."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before, config["tempdir"] = config.get("tempdir"), tempfile.mkdtemp(prefix="pymp-")
    try:
        yield config["tempdir"]
    except BaseException:
        _remove(config["tempdir"], os.getpid())
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


def watch_workers(iterator: Any, loader: DataLoader[Any], folder: str) -> None:
    """Name the workers of an iterator in errors and warnings. Their folder ends with the iterator."""
    weakref.finalize(iterator, _remove, folder, os.getpid())
    previous = signal.getsignal(signal.SIGCHLD)
    if not hasattr(iterator, "_task_info"):  # another package's iterator
        return
    kills()
    watched = _watched[iterator] = WatchedWorkers(iterator, loader)
    vars(iterator)["_try_get_data"] = watched._try_get_data
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and callable(previous) and getattr(previous, "func", None) is not _on_child:
        signal.signal(signal.SIGCHLD, partial(_on_child, previous))  # torch's raises wherever the main thread is


def check_memory(iterators: Iterable[Any]) -> None:
    """Warn of workers whose memory grows."""
    for watched in filter(None, map(_watched.get, iterators)):
        watched.check_memory()


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _on_child(previous: Callable[[int, FrameType | None], object], number: int, frame: FrameType | None) -> None:
    try:
        previous(number, frame)
    except RuntimeError as error:
        for watched in list(_watched.values()):
            error = watched.explain(error)
        raise error from None
