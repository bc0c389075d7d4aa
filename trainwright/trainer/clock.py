"""A clock: an interval of time that ends at the same step on every rank."""

from __future__ import annotations

import time

from trainwright.distributed.sync_points import SyncPoint


class IntervalClock:
    """Rank 0 looks at the time; all ranks act at the step that their sync point agrees on."""

    def __init__(self, seconds: float, sync_point: SyncPoint) -> None:
        self._seconds, self._sync_point = seconds, sync_point
        self._next = time.monotonic() + seconds

    def is_due(self, step: int) -> bool:
        """Return whether an interval ends at this optimizer step; call it at each, on every rank."""
        if self._sync_point.rank == 0 and time.monotonic() >= self._next:
            self._sync_point.request()
            self._next = float("inf")  # until this request is met
        if not self._sync_point.is_reached(step):
            return False
        self._next = time.monotonic() + self._seconds
        return True
