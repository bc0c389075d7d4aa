"""History: the values that a run has logged, and their x values on an axis of steps, epochs or time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["CURVES_NAME", "History"]

CURVES_NAME = "curves.html"
"""The page of a run's curves."""
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """The values of one metric in the order of its steps; times are seconds since 1970, or None if the files have none."""

    steps: Numbers
    values: Numbers
    times: Numbers | None = None

    @property
    def num_bad(self) -> int:
        """Return how many values are not finite."""
        return int((~np.isfinite(self.values)).sum())


@dataclass(frozen=True)
class History:
    """What a run has logged. `epochs` has a row (step, epoch) for each logged row that names its epoch."""

    folder: str
    series: dict[str, Series]
    epochs: Numbers = field(default_factory=lambda: np.empty((0, 2)))
    problems: tuple[str, ...] = ()
    """What could not be read, in sentences."""

    @property
    def last_step(self) -> int | None:
        """Return the highest step of a row; None without rows."""
        ends = [each.steps[-1] for each in self.series.values() if len(each.steps)]
        return int(max(ends)) if ends else None

    @property
    def last_epoch(self) -> int | None:
        """Return the highest epoch of a row, which counts from 0; None if no row names one."""
        return int(self.epochs[:, 1].max()) if len(self.epochs) else None

    def x_of(self, series: Series, axis: str) -> Numbers:
        """Return the x value of each value of a series; ValueError if the run's files do not say it."""
        if axis == "step":
            return series.steps
        if axis == "time":
            return self._seconds(series)
        if not len(self.epochs):
            raise ValueError(
                f"{self.folder} names no epochs in its rows, so it cannot be drawn over them; use x='step'."
            )
        return np.interp(series.steps, *self._epoch_ends())

    def _seconds(self, series: Series) -> Numbers:
        if series.times is None:
            raise ValueError(
                f"{self.folder} has no times: metrics.csv holds steps and epochs alone, and event files of a "
                "TensorBoardLogger hold times. Use x='step' or x='epoch', or log with both."
            )
        begin = min(float(each.times[0]) for each in self.series.values() if each.times is not None and len(each.times))
        return series.times - begin

    def _epoch_ends(self) -> tuple[Numbers, Numbers]:
        """Return steps and how many epochs are over after each; between them the epochs are taken as even."""
        epochs = np.unique(self.epochs[:, 1])
        ends = np.array([self.epochs[self.epochs[:, 1] == each, 0].max() for each in epochs])
        ends = np.maximum.accumulate(ends)
        if len(ends) > 2 and epochs[-1] == epochs[-2] + 1:  # the last epoch may be under way
            ends[-1] = max(ends[-1], 2 * ends[-2] - ends[-3])
        return np.concatenate([[0.0], ends]), np.concatenate([[0.0], epochs + 1])
