"""Signals that ask a run to stop, recorded even while the main thread is blocked.

A Python handler runs between two bytecodes of the main thread, so it does not run while the main thread waits in a collective
for a rank that may have left. The interpreter also writes the numbers of signals into a pipe at once, which a thread reads.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from trainwright.distributed.failures import leave

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ENDING_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)
STOPPED_EXIT_CODE = 75
"""The exit code of a run that a signal has stopped after a save: "try again later" (EX_TEMPFAIL)."""
TWICE_SECONDS = 0.5


def is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "__IPYTHON__")


def exit_code(number: int, is_saved: bool) -> int:
    """Return the exit code after a signal: 130 on Ctrl-C, 75 if the run was saved, else 128 + the signal."""
    return 128 + number if number == signal.SIGINT or not is_saved else STOPPED_EXIT_CODE


class Presses:
    """Counts Ctrl-C. Within some seconds it counts once, since a launcher may forward the terminal's."""

    def __init__(self, seconds: float = TWICE_SECONDS) -> None:
        self.count, self._latest, self._seconds = 0, float("-inf"), seconds

    def add(self) -> None:
        if time.monotonic() - self._latest > self._seconds or is_interactive():  # a launcher forwards none to a prompt
            self.count, self._latest = self.count + 1, time.monotonic()


class SignalWatch:
    """Records SIGTERM, SIGUSR1 and Ctrl-C between `open` and `close`, instead of their default action.

    The user's handlers are still called. A second Ctrl-C ends the process at once, or raises KeyboardInterrupt at a prompt. Any
    other signal after the first changes nothing. Ignored signals stay ignored. Python allows only the main thread to install
    handlers, so a watch that is opened in another thread records nothing.

    `request` is called at the first signal, in any thread. It must neither block nor raise.
    """

    def __init__(self, request: Callable[[], object], twice_seconds: float = TWICE_SECONDS) -> None:
        self.first = 0
        """The number of the first signal, or 0."""
        self.terms: list[float] = []  # the times of SIGTERM, by time.monotonic
        self._request = request
        self.previous: dict[int, Any] = {}
        """The handlers from before `open`, by signal."""
        self._wakeup = self._outer_wakeup = self._reader = -1
        self._outer: SignalWatch | None = None
        self._thread: threading.Thread | None = None
        self._interrupts = {"handler": Presses(twice_seconds), "thread": Presses(twice_seconds)}
        """How many Ctrl-C the handler and the thread have seen. Either may be delayed."""

    def open(self) -> None:
        global _open
        if threading.current_thread() is not threading.main_thread():
            return
        self._reader, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._thread = threading.Thread(target=self._read, name="trainwright-signals", daemon=True)
        self._thread.start()
        self._outer_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self.previous[number] = signal.getsignal(number)
                signal.signal(number, self._handle)
        _notice_forks()
        self._outer, _open = _open, self

    def close(self) -> None:
        global _open
        if self._thread is None:
            return
        _open, self._outer = self._outer, None
        self._restore()
        os.write(self._wakeup, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._wakeup)
        self._thread = None

    def deliver(self) -> None:
        """Send a recorded signal to this process again, after `close`, if nothing has acted on it."""
        # `_handle` has called any handler of the user.
        if self.first and self.previous.get(self.first) in (signal.SIG_DFL, signal.default_int_handler):
            os.kill(os.getpid(), self.first)

    def _restore(self) -> None:
        present = signal.set_wakeup_fd(-1)
        with contextlib.suppress(OSError, ValueError):  # it may have been closed since
            signal.set_wakeup_fd(self._outer_wakeup if present == self._wakeup else present)
        for number, previous in self.previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._record(number, "handler")
        previous = self.previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
        if self._interrupts["handler"].count > 1:  # at a prompt, because elsewhere the process has ended
            raise KeyboardInterrupt

    def _read(self) -> None:
        while True:
            for number in os.read(self._reader, 64):
                if number == 0:
                    return
                if self._outer_wakeup != -1:
                    with contextlib.suppress(OSError):
                        os.write(self._outer_wakeup, bytes([number]))
                if number in self.previous:
                    if number == signal.SIGTERM:
                        self.terms.append(time.monotonic())
                    self._record(number, "thread")

    def _record(self, number: int, where: str) -> None:
        if number == signal.SIGINT:
            self._interrupts[where].add()
            if self._interrupts[where].count > 1 and not is_interactive():
                leave(128 + number)
        if not self.first:
            self.first = number
            self._request()


_open: SignalWatch | None = None


@functools.cache  # once per process, because os cannot unregister it
def _notice_forks() -> None:
    """Remove the handlers from forked children, in which they would report a child's signals as this process's.

    Signals are blocked in a child until it has removed the inherited handlers and pipe.
    """
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_reset_child)


_held = threading.local()
"""The previous mask of the thread that forks."""


def _block() -> None:
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS) if _open is not None else None


def _unblock() -> None:
    if _held.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _reset_child() -> None:
    watch = _open
    while watch is not None:  # the innermost first
        watch._restore()
        watch = watch._outer
    _unblock()
