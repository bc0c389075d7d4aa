"""The simple profiler: shows the time of every action."""

from __future__ import annotations

import os
import time
from array import array
from dataclasses import dataclass, field

from trainwright.arguments import refuses_unknown
from trainwright.profilers.base import Profiler


@dataclass
class Duration:
    """The time of one action."""

    calls: int = 0
    seconds: float = 0.0
    own_seconds: float = 0.0
    """The seconds without inner actions."""
    of_calls: array[float] = field(default_factory=lambda: array("d"))
    """The seconds of the calls."""


@dataclass
class Running:
    action: str
    began: float
    inner_seconds: float = 0.0
    """The time of inner actions that have stopped."""


class SimpleProfiler(Profiler):
    """Measures the durations of actions and shows them in a table.

    Actions may contain other actions. For example, a hook that saves contains "save_checkpoint". So the totals and
    percentages can add up to more than the whole. The last column, "Own (s)", excludes the time of inner actions.

    Args:
        dirpath: the output folder, a local path or a URL. The default is the run's log folder.
        filename: the middle of the file's name, between the stage and, on several processes, the rank.
            Without both, the table is printed.
        extended: False omits the number of calls, the percentage and the time without inner actions.

    >>> profiler = tw.SimpleProfiler(filename="times")
    >>> trainer = tw.Trainer(profiler=profiler, max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader)  # writes the table to fit-times.txt in the run's log folder
    >>> profiler.durations["training_step"].calls
    8
    """

    @refuses_unknown
    def __init__(
        self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None, extended: bool = True
    ) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.durations: dict[str, Duration] = {}
        self._running: list[Running] = []
        self._began = time.perf_counter()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | os.PathLike[str] | None = None) -> None:
        if self.stage is not None:  # the numbers of a previous run stay readable until here
            self.durations = {}
        super().setup(stage, local_rank, log_dir)
        if not self.durations:
            self._began = time.perf_counter()

    @property
    def recorded_durations(self) -> dict[str, list[float]]:
        """Return the seconds of all calls by action."""
        return {action: list(duration.of_calls) for action, duration in self.durations.items()}

    def start(self, action: str) -> None:
        self._running.append(Running(action, time.perf_counter()))

    def stop(self, action: str) -> None:
        now = time.perf_counter()
        index = next((at for at in reversed(range(len(self._running))) if self._running[at].action == action), None)
        if index is None:
            raise RuntimeError(f"action={action!r} was stopped, but it is not running. Start it first.")
        running = self._running.pop(index)
        seconds = now - running.began
        if index:  # a later action that still runs counts from its start, so that no time counts twice
            until = self._running[index].began if index < len(self._running) else now
            self._running[index - 1].inner_seconds += until - running.began
        duration = self.durations.setdefault(action, Duration())
        duration.calls += 1
        duration.of_calls.append(seconds)
        duration.own_seconds += seconds - running.inner_seconds
        if not any(outer.action == action for outer in self._running):  # a nested call of the same action counts once
            duration.seconds += seconds

    def summary(self) -> str:
        if not self.durations:
            return ""
        whole = time.perf_counter() - self._began
        ordered = sorted(self.durations.items(), key=lambda item: -item[1].seconds)
        rows = [["Action", "Mean (s)", "Calls", "Total (s)", "%", "Own (s)"]]
        rows += [["Total", "-", str(sum(duration.calls for _, duration in ordered)), f"{whole:.4g}", "100.00", "-"]]
        for action, duration in ordered:
            seconds, calls = duration.seconds, duration.calls
            times = (f"{seconds:.4g}", f"{100 * seconds / whole:.2f}", f"{duration.own_seconds:.4g}")
            rows.append([action, f"{seconds / calls:.4g}", str(calls), *times])
        columns = range(6) if self.extended else (0, 1, 3)
        return f"Profile of {self.stage or 'this run'}\n" + _table([[row[at] for at in columns] for row in rows])


def _table(rows: list[list[str]]) -> str:
    """Return rows of cells as text. The first row is the header, and the first column is left-aligned."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append(" | ".join([first.ljust(widths[0]), *cells]))
    return "\n".join([lines[0], "-+-".join("-" * width for width in widths), *lines[1:]])
