"""RungRecord: what the ranks of one run under a rung have recorded, read together."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RungRecord:
    """One run of the script under a rung. Rates are those of all ranks together, memory is the most of any rank."""

    owner: str
    """What the script has made: a Trainer or an Accelerator."""
    steps: int
    seconds: float
    """The duration of the training, from the start of the fit or of the loop to its end."""
    points: tuple[tuple[int, float], ...]
    """Steps, and the second at which each ended."""
    samples_per_second: float | None
    batches_per_second: float | None
    steps_per_second: float | None
    """Optimizer steps of each rank; with accumulation a step takes several batches."""
    slow_steps: int
    """Steps that took so long, once warmed up, that they do not count in the rates."""
    slow_seconds: float
    peak_bytes: int | None
    metrics: dict[str, dict[str, float]]
    """What a Trainer's evaluations gave, by stage."""
    logged: dict[str, float]
    """What a loop has logged."""
    replaced: dict[str, tuple[str, str]]
    """For each setting, the script's value and the rung's."""
    has_seeded: bool
    """Whether the script has seeded itself through trainwright, and so with the rung's seed."""
    is_cut: bool
    """Whether the rung has ended the loop."""
    planned_steps: float
    """The steps of the script's whole training, which --steps may have cut; math.inf if they are unknown."""
    facts: dict[str, Any]
    """The strategy, the precision, the device and the number of processes."""

    @classmethod
    def read(cls, folder: Path) -> RungRecord | None:
        """Return the record of a rung's folder; None if the script has made neither a Trainer nor an Accelerator."""
        paths = sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem.removeprefix("rank")))
        ranks: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        if not ranks:
            return None
        first = ranks[0]
        peaks = [each["peak_bytes"] for each in ranks if each["peak_bytes"] is not None]
        merged = {
            **first,
            "points": tuple((int(step), float(second)) for step, second in first["points"]),
            "samples_per_second": _sum([each["samples_per_second"] for each in ranks]),
            "batches_per_second": _sum([each["batches_per_second"] for each in ranks]),
            "peak_bytes": max(peaks, default=None),
            "replaced": {name: (was, now) for name, (was, now) in first["replaced"].items()},
        }
        return cls(**merged)

    @property
    def seconds_to_end(self) -> float | None:
        """The duration of the whole training, estimated at the steady rate if it was cut; None if that is unknown."""
        if self.planned_steps == math.inf or self.steps_per_second is None:
            return None
        return self.seconds + (self.planned_steps - self.steps) / self.steps_per_second

    def seconds_to(self, step: int) -> float | None:
        """Return the second at which a step had been made; None if it was not."""
        before = (0, 0.0)
        for point in self.points:
            if point[0] >= step:
                part = (step - before[0]) / (point[0] - before[0])
                return before[1] + part * (point[1] - before[1])
            before = point
        return self.seconds if step <= self.steps and self.points else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) if known and len(known) == len(values) else None
