"""The simple profiler: the time of each action."""

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
    """Without the actions within it."""
    of_each: array[float] = field(default_factory=lambda: array("d"))
    """The seconds of each call."""


@dataclass
class Running:
    """An action that has been started."""

    action: str
    began: float
    inner_seconds: float = 0.0
    """The time of the actions within it that have stopped."""


class SimpleProfiler(Profiler):
    """Measures the duration of each action and shows them in a table.

    Actions may contain others, so the totals and percentages can add up to more than the whole: a hook that saves contains
    "save_checkpoint". The last column, "Own (s)", leaves out what other actions within have taken.

    Args:
        dirpath: the output folder, a local path or a URL; by default the run's log folder.
        filename: the middle of the file's name, between the stage and, on several processes, the rank.
            Without both, the table is printed.
        extended: False leaves out the number of calls, the percentage and the own time.

    >>> profiler = tw.SimpleProfiler(filename="times")
    >>> trainer = tw.Trainer(profiler=profiler, max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader)  # writes the table to fit-times.txt in the run's log folder
    >>> profiler.durations["training_step"].calls
    8
    """

    @refuses_unknown
    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        extended: bool = True,
    ) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.durations: dict[str, Duration] = {}
        self._running: list[Running] = []
        self._began = time.perf_counter()
        self._has_ended = False

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        if self._has_ended:  # not at the previous run's end, so that its numbers stay readable
            self.durations, self._has_ended = {}, False
        if not self.durations:
            self._began = time.perf_counter()

    @property
    def recorded_durations(self) -> dict[str, list[float]]:
        """Return the seconds of each call of each action."""
        return {action: list(each.of_each) for action, each in self.durations.items()}

    def start(self, action: str) -> None:
        self._running.append(Running(action, time.perf_counter()))

    def stop(self, action: str) -> None:
        now = time.perf_counter()
        index = next((at for at in reversed(range(len(self._running))) if self._running[at].action == action), None)
        if index is None:
            raise RuntimeError(f"action={action!r} was stopped, but it is not running; start it first.")
        running = self._running.pop(index)
        seconds = now - running.began
        if index:  # what is still running counts from its own start, so that no time counts twice
            until = self._running[index].began if index < len(self._running) else now
            self._running[index - 1].inner_seconds += until - running.began
        duration = self.durations.setdefault(action, Duration())
        duration.calls += 1
        duration.of_each.append(seconds)
        duration.own_seconds += seconds - running.inner_seconds
        if not any(each.action == action for each in self._running):  # a nested call of itself counts once
            duration.seconds += seconds

    def summary(self) -> str:
        if not self.durations:
            return ""
        whole = time.perf_counter() - self._began
        ordered = sorted(self.durations.items(), key=lambda item: -item[1].seconds)
        rows = [["Action", "Mean (s)", "Calls", "Total (s)", "%", "Own (s)"]]
        rows += [["Total", "-", str(sum(each.calls for _, each in ordered)), f"{whole:.4g}", "100.00", "-"]]
        rows += [
            [
                action,
                f"{each.seconds / each.calls:.4g}",
                str(each.calls),
                f"{each.seconds:.4g}",
                f"{100 * each.seconds / whole:.2f}",
                f"{each.own_seconds:.4g}",
            ]
            for action, each in ordered
        ]
        columns = range(6) if self.extended else (0, 1, 3)
        return f"Profile of {self.stage or 'this run'}\n" + _table([[row[at] for at in columns] for row in rows])

    def teardown(self, stage: str) -> None:
        self._has_ended = True


def _table(rows: list[list[str]]) -> str:
    """Return rows of cells as text; the first row is the header, the first column is left-aligned."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append(" | ".join([first.ljust(widths[0]), *cells]))
    return "\n".join([lines[0], "-+-".join("-" * width for width in widths), *lines[1:]])
