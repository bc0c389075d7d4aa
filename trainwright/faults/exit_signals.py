"""Signals of a run that has been stopped: further ones do not change its exit code, and a hang before the stop ends."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from trainwright.distributed.environment import argument_variables
from trainwright.distributed.failures import leave
from trainwright.distributed.signals import Presses, SignalWatch
from trainwright.faults.stacks import Frame, is_patient, read_stacks, stack_of

HANG_SECONDS = 25.0
"""A process without progress for that long after SIGTERM hangs. SLURM and Kubernetes kill it after 30 s."""
AGAIN_SECONDS = 5.0
"""The same for a process that then gets another SIGTERM."""


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
        self._pid = os.getpid()
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
        if signal.getsignal(number) != self._handle:  # a later run records it, and calls this as the former handler
            return
        if self._is_over or os.getpid() != self._pid:
            signal.signal(number, self._previous[number])
            os.kill(os.getpid(), number)
        elif number == signal.SIGINT:
            self._presses.add()
            if self._presses.count > 1:
                leave(self._code)

    def _on_caught(self, _: object) -> None:
        if sys._getframe().f_back is None:  # not caught: the interpreter ends
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
    """Ends a process of one rank that makes no progress after SIGTERM, with its stack. A save or a compilation is progress.

    Args:
        watch: counts the SIGTERMs.
        progress: returns a value that changes while the main thread works, or None once the run stops at a step.
    """

    def __init__(self, watch: SignalWatch, progress: Callable[[], object]) -> None:
        self._watch, self._progress = watch, progress
        text = argument_variables("grace").get("seconds", f"{HANG_SECONDS:g}")
        if not text.isdecimal():
            raise ValueError(f"TRAINWRIGHT_GRACE_SECONDS={text}: expected an integer of at least 0.")
        self._seconds = float(text)

    def start(self) -> None:
        """Look at the main thread from now on, in a thread that ends once the run stops."""
        threading.Thread(target=self._look, name="trainwright-hang-after-signal", daemon=True).start()

    def _look(self) -> None:
        latest, since, terms = object(), 0.0, 0
        while (progress := self._progress()) is not None:
            now, is_repeated = time.monotonic(), self._watch.num_terms > terms > 0
            terms = self._watch.num_terms
            if progress != latest or not terms:
                latest, since = progress, now
            elif now - since >= (AGAIN_SECONDS if is_repeated else self._seconds):
                stack = stack_of(threading.main_thread().ident or 0, read_stacks())
                if not is_patient(stack):
                    _end(now - since, stack)
                since = now
            time.sleep(0.5)


def _end(seconds: float, stack: list[Frame]) -> NoReturn:
    text = f"trainwright: the run made no progress for {seconds:.0f} s after SIGTERM, so the process ends. Nothing is saved."
    lines = "".join(f'  File "{file}", line {line} in {function}\n' for file, line, function in stack)
    # Not through sys.stderr, which the main thread may have locked.
    os.write(2, f"{text} The main thread hangs here:\n{lines}".encode())
    leave(128 + signal.SIGTERM)
