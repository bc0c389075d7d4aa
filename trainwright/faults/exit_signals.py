"""Signals of a run that has been stopped: further ones do not change its exit code."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import weakref
from contextlib import suppress
from types import FrameType
from typing import Any

from trainwright.distributed.failures import leave
from trainwright.distributed.signals import Presses, SignalWatch


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
