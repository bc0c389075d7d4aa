"""A thread that does a logger's writing, so that a training step never waits for a file."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

IDLE_SECONDS = 5.0
Work = Callable[[], None]


class BackgroundWriter:
    """Does what it is given one after the other in one daemon thread, which lives while there is work.

    A failure is kept and raised by the next `wait`. In a forked child (a loader worker) there is no thread, and what is
    submitted there is dropped: the file belongs to the parent.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._process = os.getpid()

    def submit(self, work: Work) -> None:
        """Have it done soon; returns at once."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._queue.put(work)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="trainwright-logger", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until all that was submitted is done, and raise the first failure since the last call."""
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
                with self._lock:  # nobody submits between this look and the end
                    if self._queue.empty():
                        self._thread = None
                        return
                continue
            try:
                work()
            except Exception as error:  # whatever a file system raises
                self._error = self._error or error

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy, in another process say, begins with no thread and nothing to do

    def __setstate__(self, state: dict[str, Any]) -> None:
        BackgroundWriter.__init__(self)
