"""StepClock: the time at which every step of a training ended, read without waiting for the device, and the steady rate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from trainwright.devices.abilities import times_events

MOST_UNREAD = 2_000
"""Unread marks after which the first half is read. By then a device has long passed them."""
FIRST_STEPS, FIRST_PART = 3, 10
"""The warm-up is three steps, or a tenth of all steps if that is more."""
OUTLIER = 5
"""A step that takes this many times the median is skipped: a graph was recompiled, or a checkpoint written."""


class StepClock:
    """Takes marks. `read` returns the seconds from the first mark to every mark.

    On an accelerator a mark is an event of the device, because the host runs ahead of the device. If the events of a device
    measure no time, the host's clock is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_events = times_events(device.type)
        self._seconds = [0.0]
        """The time from the first mark to every mark that was read."""
        self._unread: list[Any] = []
        """The latest mark that was read, and the later ones."""
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
        """Wait until the device has finished all issued work."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def read(self) -> list[float]:
        """Wait for the device, and return the seconds from the first mark to every mark, including the first."""
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


def steady_rate(ends: Sequence[float], amounts: Sequence[float], is_steady: Sequence[bool]) -> float | None:
    """Return the amount a second over the steady steps, or None for fewer than two steps.

    Args:
        ends: the second at which each step ended.
        amounts: the samples of each step.
        is_steady: whether only training happened between the previous step and this one.
    """
    first = min(max(FIRST_STEPS, len(ends) // FIRST_PART), len(ends) - 1)
    known = range(1, len(ends))
    choices = (
        [at for at in known if at >= first and is_steady[at]],
        [at for at in known if is_steady[at]],
        list(known),
    )
    chosen = next((steps for steps in choices if steps), [])
    took = {at: ends[at] - ends[at - 1] for at in chosen}
    most = OUTLIER * sorted(took.values())[len(took) // 2] if took else 0.0
    steady = {at: seconds for at, seconds in took.items() if seconds <= most}
    total = sum(steady.values())
    return sum(amounts[at] for at in steady) / total if total > 0 else None
