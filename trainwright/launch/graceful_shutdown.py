"""Graceful shutdown: the launcher passes a signal on to the ranks and gives them time to save and leave."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

from trainwright.distributed.signals import STOP_SIGNALS


class GracefulShutdown:
    """Passes the first SIGTERM, SIGUSR1 or Ctrl-C on to the ranks. A second Ctrl-C kills them at once.

    Args:
        send: sends a signal to all running ranks and returns their number.
        seconds: how long the ranks have to exit.
    """

    def __init__(self, send: Callable[[int], int], seconds: float) -> None:
        self.number = 0
        """The signal that was passed on, or 0 for none."""
        self.seconds = seconds
        self._send = send
        self._deadline: float | None = None
        self._interrupts = 0

    def install(self) -> None:
        """Replace elastic's handlers, which every start of the workers installs. Ignored signals stay ignored."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def start_timer(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self.seconds

    def stop_timer(self) -> None:
        self._deadline = None

    @property
    def has_timed_out(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def describe(self) -> str:
        """Return a message about ranks that did not exit in time."""
        if self._interrupts > 1:
            return "trainwright: second Ctrl-C; the ranks were killed.\n"
        why = f" after {signal.Signals(self.number).name}" if self.number else ""
        return (
            f"trainwright: the ranks had not left {self.seconds:g} s{why} and were killed; the last complete checkpoint is "
            "unchanged. Set TRAINWRIGHT_GRACE_SECONDS, or trainwright launch --grace-seconds, to give them more time.\n"
        )

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            # Not raised here, where it would interrupt elastic anywhere: the monitor's next look finds the time over.
            self.number, self._deadline = signal.SIGINT, 0.0
        elif not self.number:
            self.number = number
            self.start_timer()
            if self._send(number) == 0:  # all ranks have left already. This process waits for something else
                raise SignalException(f"signal {number}", sigval=signal.Signals(number))
