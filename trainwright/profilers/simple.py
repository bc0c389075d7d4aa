"""The simple profiler: the time of each action."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from trainwright.profilers.base import Profiler


@dataclass
class Duration:
    """The calls and the total time of one action."""

    calls: int = 0
    seconds: float = 0.0


class SimpleProfiler(Profiler):
    """Measures the duration of each action and shows them in a table.

    Actions may contain others, so the percentages can add up to more than 100.

    Args:
        dirpath: the output folder, a local path or a URL; by default the run's log folder.
        filename: the middle of the file's name, between the stage and, on several processes, the rank.
            Without both, the table is printed.
        extended: False leaves out the number of calls and the percentage.

    >>> profiler = tw.SimpleProfiler(filename="times")
    >>> trainer = tw.Trainer(profiler=profiler, max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader)  # writes the table to fit-times.txt in the run's log folder
    >>> profiler.durations["training_step"].calls
    8
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        extended: bool = True,
    ) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.durations: dict[str, Duration] = {}
        self._running: dict[str, list[float]] = {}
        self._began = time.perf_counter()
        self._has_ended = False

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        if self._has_ended:  # not at the previous run's end, so that its numbers stay readable
            self.durations, self._has_ended = {}, False
        if not self.durations:
            self._began = time.perf_counter()

    def start(self, action: str) -> None:
        self._running.setdefault(action, []).append(time.perf_counter())

    def stop(self, action: str) -> None:
        now = time.perf_counter()
        starts = self._running.get(action)
        if not starts:
            raise RuntimeError(f"action={action!r} was stopped, but it is not running; start it first.")
        began = starts.pop()
        duration = self.durations.setdefault(action, Duration())
        duration.calls += 1
        if not starts:  # a nested call of itself counts once
            duration.seconds += now - began

    def summary(self) -> str:
        if not self.durations:
            return ""
        whole = time.perf_counter() - self._began
        rows = [("Total", sum(each.calls for each in self.durations.values()), whole)]
        ordered = sorted(self.durations.items(), key=lambda item: -item[1].seconds)
        rows += [(action, each.calls, each.seconds) for action, each in ordered]
        header = ["Action", "Mean (s)", "Calls", "Total (s)", "%"]
        cells = [
            [
                action,
                f"{seconds / calls:.4g}" if calls and action != "Total" else "-",
                str(calls),
                f"{seconds:.4g}",
                f"{100 * seconds / whole:.2f}",
            ]
            for action, calls, seconds in rows
        ]
        columns = range(5) if self.extended else (0, 1, 3)
        return f"Profile of {self.stage or 'this run'}\n" + _table(
            [[row[at] for at in columns] for row in [header, *cells]]
        )

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
