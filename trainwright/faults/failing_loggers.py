"""Calls and writes of loggers that may fail: a full disk or a service without an answer never ends a training."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainwright.faults.remote_calls import is_outage
from trainwright.rank_zero import warn

IDLE_SECONDS = 5.0
"""The time after which a thread without work ends."""
FLUSH_SECONDS, END_SECONDS = 20.0, 120.0
"""How long a flush waits for slow writes, so that it does not delay a checkpoint, and how long the end of a run does."""
Work = Callable[[], None]


@dataclass
class _Outage:
    """An outage of one logger. `rows` counts the rows that it has lost, also in earlier outages."""

    rows: int = 0
    call: str = ""
    """The method whose success ends the outage, or "" if the logger works."""


_outages: dict[int, _Outage] = {}
"""The outages by the logger's id, until the logger is closed."""


def outlived(logger: Any, name: str, *arguments: Any, **options: Any) -> Any:
    """Return the result of a logger's method. An outage is one warning, and the result None.

    Another warning follows when the logger works again, or is closed while rows are missing. Errors of a program are raised.
    """
    kind, result = type(logger).__name__, None
    outage = _outages.get(id(logger), _Outage())
    try:
        result = getattr(logger, name)(*arguments, **options)
    except Exception as error:
        if not is_outage(error):
            raise
        outage.rows += name == "log_metrics"
        if not outage.call:
            outage.call = name
            _outages[id(logger)] = outage
            warn(
                f"{kind}.{name} failed: {type(error).__name__}: {str(error).rstrip('.')}. Training continues, and rows of this "
                "logger may be lost.",
                stacklevel=2,
            )
    else:
        if outage.call == name:
            outage.call = ""
            warn(f"{kind} works again; {_lost(logger, outage)}.", stacklevel=2)
    if name == "close" and _outages.pop(id(logger), None) is not None and outage.call:
        warn(f"{kind} was closed before it worked again; {_lost(logger, outage)}.", stacklevel=2)
    return result


def _lost(logger: Any, outage: _Outage) -> str:
    return f"{outage.rows + getattr(logger, 'num_missing', 0)} rows lost"


class BackgroundWriter:
    """Runs submitted work in order in one daemon thread, which lives while there is work.

    The next `wait` raises a failure. A forked child, such as a loader worker, drops work: the file belongs to the parent.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._late: threading.Event | None = None
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

    @property
    def is_late(self) -> bool:
        """Return whether the thread has not caught up since a `wait` has ended with TimeoutError."""
        return self._late is not None and not self._late.is_set()

    @property
    def has_failed(self) -> bool:
        """Return whether the next `wait` raises a failure."""
        return self._error is not None

    def wait(self, seconds: float = FLUSH_SECONDS) -> None:
        """Wait until all submitted work is done, and raise the first failure since the last call, or TimeoutError."""
        if os.getpid() != self._process:
            return
        if self._thread is not None:
            done = threading.Event()
            self.submit(done.set)
            # Not for every row, while a store does not answer.
            if done.wait(0.0 if self.is_late and seconds < END_SECONDS else seconds):
                self._late = None
            else:
                self._late = done
                raise self._error or TimeoutError(f"its writes have not ended within {seconds:g} s")
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
