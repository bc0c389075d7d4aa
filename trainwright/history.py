"""History: the values that a run has logged, over steps or epochs. It draws its curves with `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["CURVES_NAME", "History"]

CURVES_NAME = "curves.html"
"""The page of a run's curves."""
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """The values of one metric in the order of its steps."""

    steps: Numbers
    values: Numbers


@dataclass(frozen=True)
class History:
    """The metrics that a run has logged. `epochs` has a row (step, epoch) for every logged row with an epoch."""

    folder: str
    series: dict[str, Series]
    epochs: Numbers = field(default_factory=lambda: np.empty((0, 2)))
    problems: tuple[str, ...] = ()
    """Sentences about unreadable data."""

    @property
    def last_step(self) -> int | None:
        """Return the highest step of a row, or None if there is no row."""
        ends = [series.steps[-1] for series in self.series.values() if len(series.steps)]
        return int(max(ends)) if ends else None

    @property
    def last_epoch(self) -> int | None:
        """Return the highest epoch of a row, counted from 0, or None if no row names one."""
        return int(self.epochs[:, 1].max()) if len(self.epochs) else None

    def draw(self, path: str, metrics: Sequence[str] | None = None) -> bytes:
        """Return the curves as the bytes of a page, for a path that ends in .html."""
        from trainwright.plots import check_page, draw

        check_page(path)
        return draw([self], metrics)

    def x_of(self, series: Series, axis: str) -> Numbers:
        """Return the x values of a series; ValueError if the run's files do not contain them."""
        if axis == "step":
            return series.steps
        if not len(self.epochs):
            raise ValueError(f"{self.folder} has no epochs in its rows, so it cannot be drawn over them; use x='step'.")
        return np.interp(series.steps, *self._epoch_ends())

    def _epoch_ends(self) -> tuple[Numbers, Numbers]:
        """Return steps, and the number of finished epochs after each one. Epochs between them count as even."""
        epochs = np.unique(self.epochs[:, 1])
        ends = np.array([self.epochs[self.epochs[:, 1] == epoch, 0].max() for epoch in epochs])
        ends = np.maximum.accumulate(ends)
        if len(ends) > 2 and epochs[-1] == epochs[-2] + 1:  # the last epoch may be under way
            ends[-1] = max(ends[-1], 2 * ends[-2] - ends[-3])
        return np.concatenate([[0.0], ends]), np.concatenate([[0.0], epochs + 1])
