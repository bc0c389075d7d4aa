"""Grace: a signal to the launcher, passed on to the ranks, and the time that they have then to save and leave.

Importing this module imports torch elastic, so only the launcher process does it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

from trainwright.distributed.signals import STOP_SIGNALS


class Grace:
    """Passes the first SIGTERM, SIGUSR1 or Ctrl-C on to the ranks; a second Ctrl-C takes their time away.

    Args:
        send: sends a signal to each rank that runs, and returns how many there are.
        seconds: how long the ranks have to leave.
    """

    def __init__(self, send: Callable[[int], int], seconds: float) -> None:
        self.number = 0
        """The signal that was passed on; 0 for none."""
        self.seconds = seconds
        self._send = send
        self._deadline: float | None = None
        self._interrupts = 0

    def open(self) -> None:
        """Take over from elastic's handlers, each time that it has installed them; what is ignored stays so."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def begin(self) -> None:
        """Let the time run from now on, unless it does."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.seconds

    @property
    def is_over(self) -> bool:
        """Whether the ranks have had their time."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def describe(self) -> str:
        """Say what was done to ranks that have not left in time."""
        if self._interrupts > 1:
            return "trainwright: a second Ctrl-C; the ranks were ended at once.\n"
        why = f" after {signal.Signals(self.number).name}" if self.number else ""
        return (
            f"trainwright: the ranks had not left {self.seconds:g} s{why}, and were ended; the last checkpoint that was whole "
            "stands. More time is given by TRAINWRIGHT_GRACE_SECONDS, or trainwright launch --grace-seconds.\n"
        )

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            self.number, self._deadline = signal.SIGINT, 0.0
        elif not self.number:
            self.number = number
            self.begin()
            if self._send(number) == 0:  # they have all left, and this process waits for something else
                raise SignalException(f"signal {number}", sigval=signal.Signals(number))
