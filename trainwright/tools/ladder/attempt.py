"""Attempts and results: one run of a script under a rung, and all runs of a rung, one for each seed."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from trainwright.tools.ladder.rung import Rung
from trainwright.tools.ladder.rung_record import RungRecord

State = Literal["finished", "failed", "timed out", "skipped", "interrupted"]


WORDS = {
    "test": re.compile(r"(?<![a-z])test"),  # not that of "latest"
    "validation": re.compile(r"(?<![a-z])(?:e?val|valid|validation|evaluation)(?![a-z])|(?<![a-z])val(?=loss|acc)"),
}
"""What the names of a stage's metrics contain."""
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True)
class Attempt:
    """One run of the script under a rung."""

    rung: Rung
    state: State
    reason: str = ""
    """Why it has not finished."""
    record: RungRecord | None = None
    printed: dict[str, dict[str, float]] = field(default_factory=dict)
    """The latest metrics that it has printed, by stage and name."""
    log: str = ""
    """The file with its output."""
    seconds: float = 0.0
    """The time from the start of its processes to their end."""
    older: tuple[str, ...] = ()
    """The checkpoints from before the ladder whose names this run could not use."""

    def metrics(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield where metrics come from, and their values: those of tests first, and a Trainer's before what is printed."""
        if self.record is None:
            return
        for stage, word in WORDS.items():
            evaluated = self.record.metrics.get(stage, {})
            yield (
                f"trainer, {stage}",
                {name: evaluated[name] for name in evaluated if _holds(name, word)} or evaluated,
            )
            yield f"log, {stage}", {name: value for name, value in self.record.logged.items() if _holds(name, word)}
            yield f"output, {stage}", self.printed.get(stage, {})
        yield "log", self.record.logged


def _holds(name: str, word: re.Pattern[str]) -> bool:
    return word.search(_HUMP.sub("_", name).lower()) is not None


class Figure(NamedTuple):
    """The mean of a rung's runs, and their standard deviation; None for a single run."""

    mean: float
    spread: float | None = None


@dataclass(frozen=True)
class Result:
    """All runs of a rung."""

    attempts: tuple[Attempt, ...]

    @property
    def rung(self) -> Rung:
        return self.attempts[0].rung

    @property
    def finished(self) -> list[Attempt]:
        return [each for each in self.attempts if each.state == "finished"]

    @property
    def state(self) -> State:
        """The state of the runs: that of the first which has not finished, if there is one."""
        return next((each.state for each in self.attempts if each.state != "finished"), "finished")

    def figure(self, value: Callable[[RungRecord], float | None]) -> Figure | None:
        """Return the figure of a value of the records; None if a finished run lacks it."""
        return figure_of([None if each.record is None else value(each.record) for each in self.finished])


def figure_of(values: Sequence[float | None]) -> Figure | None:
    known = [each for each in values if each is not None]
    if not known or len(known) < len(values):
        return None
    return Figure(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)
