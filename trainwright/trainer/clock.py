"""A clock: something that is due each so many seconds, at one and the same step on every rank."""

from __future__ import annotations

import time

from trainwright.distributed.appointments import Appointment


class IntervalClock:
    """Rank 0 looks at the time; all ranks keep the appointment that it asks for.

    Args:
        seconds: the interval, from now on.
        appointment: of this run.
    """

    def __init__(self, seconds: float, appointment: Appointment) -> None:
        self._seconds, self._appointment = seconds, appointment
        self._next = time.monotonic() + seconds

    def is_due(self, step: int) -> bool:
        """Return whether it is due at this optimizer step; call it at each, on every rank."""
        if self._appointment.rank == 0 and time.monotonic() >= self._next:
            self._appointment.ask()
            self._next = float("inf")  # until this one was kept
        if not self._appointment.is_due(step):
            return False
        self._next = time.monotonic() + self._seconds
        return True
