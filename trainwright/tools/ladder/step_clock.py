"""StepClock: when each step of a training ended, read without waiting for the device at each of them."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

from trainwright.devices.abilities import times_events

MOST_UNREAD = 2_000
"""Marks that are kept before the first half of them is read; by then a device has long passed them."""


class StepClock:
    """Takes marks; `read` returns the seconds from the first of them to each.

    On an accelerator a mark is an event of the device, because the host runs ahead of it: what the host's clock shows at the
    end of a step is when the step was issued. A device whose events measure no time is read by the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_events = times_events(device.type)
        self._seconds = [0.0]
        """The time from the first mark to each that was read."""
        self._unread: list[Any] = []
        """The last mark that was read, and those after it."""
        self.mark()

    def mark(self) -> None:
        """Take a mark."""
        if self._has_events:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
            self._unread.append(event)
        else:
            self._unread.append(time.perf_counter())
        if len(self._unread) > MOST_UNREAD:
            self._read(MOST_UNREAD // 2)

    def wait(self) -> None:
        """Wait until the device has computed all that was issued to it."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def read(self) -> list[float]:
        """Return the seconds from the first mark to each, itself included. It waits for the device."""
        self.wait()
        self._read(len(self._unread) - 1)
        return list(self._seconds)

    def _read(self, count: int) -> None:
        if self._has_events:
            self._unread[count].synchronize()
        for first, second in pairwise(self._unread[: count + 1]):
            passed = first.elapsed_time(second) / 1000 if self._has_events else second - first
            self._seconds.append(self._seconds[-1] + passed)
        del self._unread[:count]
