"""Signals of a run that has been stopped: further ones do not change its exit code, and a hang before the stop ends."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from trainwright.distributed.environment import argument_variables
from trainwright.distributed.failures import leave
from trainwright.distributed.signals import Presses, SignalWatch

HANG_SECONDS = 25.0
"""A process without progress for that long after SIGTERM hangs. SLURM and Kubernetes kill it after 30 s."""
AGAIN_SECONDS = 5.0
"""The same for a process that then gets another SIGTERM."""
SAVING = os.path.join("trainwright", "checkpoint", "")
"""A part of the paths in the stack of a thread that saves."""


def end_watch(watch: SignalWatch, error: SystemExit) -> SystemExit:
    """Close the watch of a stopped run and return the error, until whose end further signals change nothing."""
    ExitSignals(error, watch.previous)
    watch.close()
    return error


class ExitSignals:
    """Handlers between the end of a stopped run and the end of the process, in place of the default ones.

    SIGTERM and SIGUSR1 change nothing, and another Ctrl-C ends the process with the same exit code at once. If the program
    catches the error that ends the run, the former handlers return.
    """

    def __init__(self, error: SystemExit, previous: dict[int, Any]) -> None:
        self._code, self._presses, self._is_over = int(error.code or 0), Presses(), False
        self._presses.add()  # the Ctrl-C that has stopped the run may still come from a launcher
        self._previous = {
            number: handler
            for number, handler in previous.items()
            if handler in (signal.SIG_DFL, signal.default_int_handler)
        }
        for number in self._previous:
            signal.signal(number, self._handle)
        self._error = weakref.ref(error, self._on_caught)
        if self._previous:
            atexit.register(_ignore, self._previous.keys() - {signal.SIGINT})

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._is_over:
            signal.signal(number, self._previous[number])
            os.kill(os.getpid(), number)
        elif number == signal.SIGINT:
            self._presses.add()
            if self._presses.count > 1:
                leave(self._code)

    def _on_caught(self, _: object) -> None:
        if sys._getframe().f_back is None:  # nobody has caught it: the interpreter ends
            return
        self._is_over = True
        with suppress(ValueError):  # in another thread the handler does it
            for number, previous in self._previous.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, previous)


def _ignore(numbers: set[int]) -> None:
    # The interpreter restores default handlers while it ends, and leaves ignored signals ignored.
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


class HangAfterSignal:
    """Ends a process of one rank that makes no progress after SIGTERM, with the stack of its main thread.

    A save is progress.

    Args:
        progress: returns a value that changes while the main thread works, or None once the run stops at a step.
    """

    def __init__(self, progress: Callable[[], object]) -> None:
        self._progress, self._latest = progress, object()
        self._since, self._signals = 0.0, 0
        text = argument_variables("grace").get("seconds", f"{HANG_SECONDS:g}")
        if not text.isdecimal():
            raise ValueError(f"TRAINWRIGHT_GRACE_SECONDS={text}: expected an integer of at least 0.")
        self._seconds = float(text)

    def check(self, signals: int) -> None:
        """End the process if it hangs. `signals` is the number of SIGTERMs so far."""
        progress, now = self._progress(), time.monotonic()
        if progress is None:
            return
        if progress != self._latest:
            self._latest, self._since, self._signals = progress, now, signals
        waited, is_repeated = now - self._since, signals > self._signals
        self._signals = signals
        if waited < (AGAIN_SECONDS if is_repeated else self._seconds):
            return
        stack = main_stack()
        if SAVING in stack:
            self._since = now
            return
        again = " and a further SIGTERM" if is_repeated else ""
        text = (
            f"trainwright: the run made no progress for {waited:.0f} s after SIGTERM{again}. The process ends, and nothing is "
            f"saved. Its main thread hangs here:\n{stack}\n"
        )
        os.write(2, text.encode())  # the main thread may have locked sys.stderr
        leave(128 + signal.SIGTERM)


def main_stack() -> str:
    """Return the stack of the main thread, the latest call first."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        threads = file.read().decode(errors="replace").split("\n\n")
    name = f"0x{threading.main_thread().ident:016x}"
    return next((thread for thread in threads if name in thread.partition("\n")[0]), "")
