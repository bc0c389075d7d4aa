"""Attempts: one run of a script under a rung, with its record."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainwright.tools.ladder.rung import Rung

State = Literal["finished", "failed", "timed out", "skipped", "interrupted"]
WORDS = {
    "test": re.compile(r"(?<![a-z])test"),  # not in "latest"
    "validation": re.compile(r"(?<![a-z])(?:e?val|valid|validation|evaluation)(?![a-z])|(?<![a-z])val(?=loss|acc)"),
}
"""Words in the names of a stage's metrics."""
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True)
class RungRecord:
    """The record of one run under a rung. Rates add up all ranks; memory is the maximum over ranks."""

    owner: str
    """The object that the script made: a Trainer or an Accelerator."""
    steps: int
    seconds: float
    """The duration of the training, from the start of the fit or loop to its end."""
    points: tuple[tuple[int, float], ...]
    """Steps, and the second at which each ended."""
    samples_per_second: float | None
    batches_per_second: float | None
    steps_per_second: float | None
    """Optimizer steps of a rank. With accumulation a step takes several batches."""
    peak_bytes: int | None
    metrics: dict[str, dict[str, float]]
    """The metrics of a Trainer's evaluations, by stage."""
    logged: dict[str, float]
    """The values that a loop has logged."""
    replaced: dict[str, tuple[str, str]]
    """The script's value and the rung's value of every replaced setting."""
    is_cut: bool
    """Whether the rung has ended the loop."""
    planned_steps: float
    """The steps of the script's whole training, which --steps may have cut; math.inf if unknown."""
    facts: dict[str, Any]
    """The strategy, the precision, the device and the number of processes."""

    @classmethod
    def read(cls, folder: Path) -> RungRecord | None:
        """Return the record in a rung's folder, or None if the script made no Trainer or Accelerator."""
        paths = sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem.removeprefix("rank")))
        ranks: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        if not ranks:
            return None
        first = ranks[0]
        merged = {
            **first,
            "points": tuple((int(step), float(second)) for step, second in first["points"]),
            "samples_per_second": _sum([rank["samples_per_second"] for rank in ranks]),
            "batches_per_second": _sum([rank["batches_per_second"] for rank in ranks]),
            "peak_bytes": max((rank["peak_bytes"] for rank in ranks if rank["peak_bytes"] is not None), default=None),
            "replaced": {name: (was, now) for name, (was, now) in first["replaced"].items()},
        }
        return cls(**merged)

    @property
    def seconds_to_end(self) -> float | None:
        """The duration of the whole training, or None if unknown. A cut training is extended at its steady rate."""
        if self.planned_steps == math.inf or self.steps_per_second is None:
            return None
        return self.seconds + (self.planned_steps - self.steps) / self.steps_per_second

    def seconds_to(self, step: int) -> float | None:
        """Return the second at which a step ended, or None if the run did not reach it."""
        before = (0, 0.0)
        for point in self.points:
            if point[0] >= step:
                part = (step - before[0]) / (point[0] - before[0])
                return before[1] + part * (point[1] - before[1])
            before = point
        return self.seconds if step <= self.steps and self.points else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


@dataclass(frozen=True)
class Attempt:
    """One run of the script under a rung."""

    rung: Rung
    state: State
    reason: str = ""
    """Why it has not finished."""
    record: RungRecord | None = None
    printed: dict[str, dict[str, float]] = field(default_factory=dict)
    """The latest printed metrics, by stage and name."""
    log: str = ""
    """The file with its output."""
    seconds: float = 0.0
    """The time from the start of its processes to their end."""
    older: tuple[str, ...] = ()
    """Checkpoints from before the ladder whose names this run could not use."""

    def figure(self, value: Callable[[RungRecord], float | None]) -> float | None:
        """Return a value of its record, or None if it has not finished."""
        return None if self.record is None or self.state != "finished" else value(self.record)

    def metrics(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield the sources of metrics with their values: test before validation, a Trainer's before printed ones."""
        if self.record is None:
            return
        for stage, word in WORDS.items():
            evaluated = self.record.metrics.get(stage, {})
            yield f"trainer, {stage}", _named_with(word, evaluated) or evaluated
            yield f"log, {stage}", _named_with(word, self.record.logged)
            yield f"output, {stage}", self.printed.get(stage, {})
        yield "log", self.record.logged


def _named_with(word: re.Pattern[str], values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if word.search(_HUMP.sub("_", name).lower())}
