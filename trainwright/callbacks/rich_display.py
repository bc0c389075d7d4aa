"""RichDisplay: bars of rich at the bottom of a terminal, with printed lines above them. It imports rich."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.style import Style
from rich.table import Column
from rich.text import Text

WIDEST_BAR, NARROWEST_BAR = 40, 10
WIDE = 80
"""The columns of a terminal that has room for the speed."""


class StyledColumn(ProgressColumn):
    """A column of a text that is computed from the task."""

    def __init__(self, text: Callable[[Task], str], style: str | Style, column: Column) -> None:
        super().__init__(column)
        self._text, self._style = text, style

    def render(self, task: Task) -> Text:
        return Text(self._text(task), style=self._style)


def _count(task: Task) -> str:
    return f"{int(task.completed)}/{'?' if task.total is None else int(task.total)}"


def _speed(task: Task) -> str:
    speed = task.finished_speed or task.speed
    if not speed and task.elapsed:  # rich knows it from the second update on
        speed = (task.completed - task.fields.get("begun", 0)) / task.elapsed
    return f"{speed or 0.0:.2f}it/s"


def _times(task: Task) -> str:
    return f"{TimeElapsedColumn().render(task)}<{TimeRemainingColumn().render(task)}"


def default_columns(styles: dict[str, Any], width: int) -> list[ProgressColumn]:
    """Return the columns for a terminal of this width, in the styles of a theme, without the metrics."""
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", style=styles["description"], markup=False, table_column=Column(no_wrap=True)),
        BarColumn(
            bar_width=min(WIDEST_BAR, max(NARROWEST_BAR, width // 6)),
            complete_style=styles["progress_bar"],
            finished_style=styles["progress_bar_finished"],
            pulse_style=styles["progress_bar_pulse"],
            table_column=Column(no_wrap=True),
        ),
        StyledColumn(_count, styles["batch_progress"], Column(no_wrap=True)),
        StyledColumn(_times, styles["time"], Column(no_wrap=True)),
        StyledColumn(_speed, styles["processing_speed"], Column(no_wrap=True)),
    ]
    return columns if width >= WIDE else columns[:-1]


class RichDisplay:
    """The bars on the screen, from the first that is added until the last is closed."""

    def __init__(
        self, console: Console, columns: list[ProgressColumn], style: str | Style, text: Callable[[dict[str, Any]], str]
    ) -> None:
        is_terminal = console.is_terminal
        self._progress = Progress(
            *columns,
            # In several lines if one has no room for them.
            StyledColumn(lambda task: task.fields["metrics"], style, Column(overflow="fold")),
            console=console,
            auto_refresh=False,  # the callback decides when an update is due, and a process that forks has no thread
            redirect_stdout=is_terminal and sys.stdout.isatty(),  # otherwise prints go to a file
            redirect_stderr=is_terminal,
        )
        self._text = text
        self._bars: list[RichBar] = []

    @property
    def is_open(self) -> bool:
        """Return whether there is a bar that is not closed."""
        return bool(self._bars)

    def add(self, title: str, total: int | None, count: int, leave: bool) -> RichBar:
        """Show a bar below the others. `leave` keeps it on the screen after all are closed."""
        bar = RichBar(self, self._progress, self._text, leave)
        self._bars.append(bar)
        if len(self._bars) == 1:
            self._progress.start()
        bar.restart(title, total, count)
        return bar

    def end(self, bar: RichBar) -> None:
        """Drop a bar, and leave the screen after the last one."""
        self._bars.remove(bar)
        if self._bars:
            self._progress.refresh()
            return
        self._progress.live.transient = not self._progress.tasks  # an empty display would leave an empty line
        self._progress.refresh()
        self._progress.stop()


class RichBar:
    def __init__(
        self, display: RichDisplay, progress: Progress, text: Callable[[dict[str, Any]], str], leave: bool
    ) -> None:
        self._display, self._progress, self._text, self._leave = display, progress, text, leave
        self._task: TaskID | None = None
        self._metrics = ""

    def _remove(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def restart(self, title: str, total: int | None, count: int) -> None:
        self._remove()  # rich keeps a known total if the new one is None
        self._task = self._progress.add_task(title, total=total, completed=count, metrics=self._metrics, begun=count)
        self._progress.refresh()

    def show(self, metrics: dict[str, Any]) -> None:
        assert self._task is not None
        self._metrics = self._text(metrics)
        self._progress.update(self._task, metrics=self._metrics)

    def move_to(self, batches: int) -> None:
        assert self._task is not None
        self._progress.update(self._task, completed=batches)
        self._progress.refresh()

    def refresh(self) -> None:
        self._progress.refresh()

    def close(self) -> None:
        if not self._leave:
            self._remove()
        self._display.end(self)
