"""A thread that writes for a logger, so that a training step never waits for a file."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

IDLE_SECONDS = 5.0
Work = Callable[[], None]


class Flushed(Protocol):
    """A logger, for functions that only flush it."""

    def flush(self) -> None:
        """Write what is buffered."""


class BackgroundWriter:
    """Runs submitted work in order in one daemon thread, which lives while there is work.

    The next `wait` raises a failure. A forked child, such as a loader worker, drops work: the file belongs to the parent.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._process = os.getpid()

    def submit(self, work: Work) -> None:
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="trainwright-logger", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # from Python 3.12 on, no thread starts at the interpreter's end
                    self._thread = None
                    work()
                    return
            self._queue.put(work)

    def wait(self) -> None:
        """Wait until all submitted work is done, and raise the first failure since the last call."""
        if os.getpid() != self._process:
            return
        if self._thread is not None:
            done = threading.Event()
            self.submit(done.set)
            done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            try:
                work = self._queue.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:  # so that no work is submitted between the check and the thread's end
                    if self._queue.empty():
                        self._thread = None
                        return
                continue
            try:
                work()
            except Exception as error:  # file systems raise errors of any type
                self._error = self._error or error

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy, for example in another process, starts without thread and work

    def __setstate__(self, state: dict[str, Any]) -> None:
        BackgroundWriter.__init__(self)


def flush_at_exit(logger: Flushed, *, keep: bool = False) -> None:
    """Flush a logger at the end of the process if it still exists. `keep` keeps it alive."""
    find: Callable[[], Flushed | None] = (lambda: logger) if keep else weakref.ref(logger)
    process = os.getpid()

    def flush() -> None:
        if os.getpid() == process and (alive := find()) is not None:
            alive.flush()

    atexit.register(flush)
