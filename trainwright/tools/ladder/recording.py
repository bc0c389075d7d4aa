"""Recording: the measurements of a process under a rung. It writes rank0.json and so on into the rung's folder."""

from __future__ import annotations

import atexit
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from trainwright import rank_zero_only
from trainwright.devices.abilities import times_events
from trainwright.overrides import OverrideFile
from trainwright.rank_zero import say
from trainwright.tools.ladder.rung import Rung

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


MOST_POINTS = 5_000
"""The largest number of steps whose times are written. Longer runs are thinned evenly."""


class Recording:
    """The steps, samples, times, memory and metrics of this process. Times count from the start of a fit or loop.

    The time between two fits of a script does not count.
    """

    def __init__(self, file: OverrideFile) -> None:
        self._file, self.rung = file, Rung.read(file.path)
        self._owner = ""
        self._facts: dict[str, Any] = {}
        self._device = torch.device("cpu")
        self._clock: StepClock | None = None
        self._rows: list[tuple[int, float, int, bool]] = []
        """Of every step of the current fit: its number, samples, batches, and whether only training preceded it."""
        self._steps = 0
        self._samples, self._batches = 0.0, 0
        """The counts since the latest step."""
        self._is_steady = True
        self._lacks_samples = False
        self._points: list[tuple[int, float, float, int, bool]] = []
        """The rows of earlier fits, with the second at which the step ended after its number."""
        self._total = 0.0
        self._metrics: dict[str, dict[str, float]] = {}
        self._logged: dict[str, Any] = {}
        self._is_cut = False
        self._cut_steps = 0.0
        """The steps that --steps has cut off, or math.inf if unknown."""

    def note_made(self, owner: str) -> None:
        """Record that a Trainer or an Accelerator was made. The first one writes a record without steps."""
        self._owner = self._owner or owner
        if not self._path.exists():
            self.write()

    def begin(self, owner: str, device: torch.device, strategy: str, precision: str, num_processes: int) -> None:
        """Start the clock of a fit, or of a loop that ends with the process."""
        if self._clock is not None:
            self.end(at_latest_step=True)
        elif not self._points:
            self._write_at_exit()  # a loop does not say when it ends
        self._owner, self._device = owner, device
        self._facts = {"strategy": strategy, "precision": precision, "processes": num_processes, "device": device.type}
        self._clock, self._is_steady = StepClock(device), False
        self._samples, self._batches = 0.0, 0

    def _write_at_exit(self) -> None:
        if multiprocessing.parent_process() is None:
            atexit.register(self.write)
        else:  # a process that multiprocessing has forked ends without atexit before Python 3.13
            Finalize(None, self.write, exitpriority=0)

    @property
    def is_running(self) -> bool:
        """Whether a fit or a loop is under way."""
        return self._clock is not None

    @property
    def is_fitting(self) -> bool:
        """Whether a Trainer's fit is under way."""
        return self.is_running and self._owner == "Trainer"

    @property
    def is_cut(self) -> bool:
        """Whether the rung has ended a loop."""
        return self._is_cut

    def note_batch(self, samples: int | None) -> None:
        """Record a trained batch, with its number of samples if known."""
        self._lacks_samples = self._lacks_samples or samples is None
        self._samples += samples or 0
        self._batches += 1

    def note_pause(self) -> None:
        """Exclude the time up to the next step from the rates."""
        self._is_steady = False

    def note_steps(self, count: int) -> None:
        """Record that optimizers have stepped this many times since the latest batch."""
        self._steps += count
        if self._clock is not None:
            self._clock.mark()
            self._rows.append((self._steps, self._samples, self._batches, self._is_steady))
        self._samples, self._batches, self._is_steady = 0.0, 0, True

    def count_step(self) -> None:
        """Record another optimizer's step on the same batch."""
        self._steps += 1

    def end(self, *, at_latest_step: bool = False, cut_steps: float = 0.0) -> None:
        """Wait for the device, and stop the clock now, or with `at_latest_step` at the latest step."""
        if self._clock is None:
            return
        self._cut_steps += cut_steps
        if not at_latest_step:
            self._clock.wait()
            self._clock.mark()
        seconds = self._clock.read()
        for row, end in zip(self._rows, seconds[1:], strict=False):
            self._points.append((row[0], self._total + end, *row[1:]))
        self._total += seconds[-1]
        self._clock, self._rows = None, []

    def cut(self) -> None:
        """End a loop after the rung's steps, which are the same number on every rank."""
        self._is_cut, self._cut_steps = True, math.inf
        self.end(at_latest_step=True)
        self.write()
        if rank_zero_only.rank == 0:
            say(f"trainwright: the rung ends this loop after {self.rung.steps} steps.")
        raise SystemExit(0)

    def note_metrics(self, stage: str, values: Mapping[str, Any]) -> None:
        """Record the metrics of an evaluation, in the place of an earlier one of the same stage."""
        self._metrics[stage] = {name: float(value) for name, value in values.items()}

    def note_logged(self, values: Mapping[str, Any]) -> None:
        """Record the values that a loop logs, in the place of earlier values of the same names."""
        for name, value in values.items():
            # Read only at the end, since reading a tensor waits for its device.
            self._logged[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def write(self) -> None:
        """Write the record."""
        self.end(at_latest_step=True)
        made, ends = [row[0] for row in self._points], [row[1] for row in self._points]
        steady = [row[4] for row in self._points]
        spacing = -(-len(self._points) // MOST_POINTS) or 1
        written = self._points[spacing - 1 :: spacing]
        samples_per_second = steady_rate(ends, [row[2] for row in self._points], steady)
        record = {
            "owner": self._owner,
            "steps": self._steps,
            "seconds": self._total,
            "points": [[row[0], round(row[1], 6)] for row in written],
            "samples_per_second": None if self._lacks_samples else samples_per_second,
            "batches_per_second": steady_rate(ends, [row[3] for row in self._points], steady),
            "steps_per_second": steady_rate(ends, [after - before for before, after in pairwise([0, *made])], steady),
            "peak_bytes": peak_bytes(self._device),
            "metrics": self._metrics,
            "logged": {name: number for name, value in self._logged.items() if (number := _number(value)) is not None},
            "replaced": self._file.replaced,
            "is_cut": self._is_cut,
            "planned_steps": self._steps + self._cut_steps,
            "facts": self._facts,
        }
        if not self._points:
            record = self._with_earlier(record)
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(record), encoding="utf-8")
        temporary.replace(self._path)

    def _with_earlier(self, record: dict[str, Any]) -> dict[str, Any]:
        """Merge a record without steps into the record of another process that the run spawned."""
        try:
            earlier = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return record
        if not earlier["points"]:
            return record
        return {**earlier, **{name: {**earlier[name], **record[name]} for name in ("metrics", "logged", "replaced")}}

    @property
    def _path(self) -> Path:
        return Path(self.rung.folder) / f"rank{rank_zero_only.rank}.json"


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def peak_bytes(device: torch.device) -> int | None:
    """Return this process's peak memory: allocated on its accelerator, or resident on the host."""
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        try:
            return int(module.max_memory_allocated(device))
        except (AttributeError, RuntimeError, NotImplementedError, TypeError):
            return None
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage, whose peak a process inherits from its parent.
        peaks = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        if peaks:
            return int(peaks[0]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
