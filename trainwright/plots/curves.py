"""Curves: the input of the plots, the metrics of a panel, the labels of curves, and their drawn points."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

AXES = ("step", "epoch")
"""The possible x axes."""
Numbers = NDArray[np.float64]
LOSS, METRICS, RATES, THROUGHPUT = "Loss", "Metrics", "Learning rate", "Throughput"
GROUPS = (LOSS, METRICS, RATES, THROUGHPUT)
LARGEST = 1e300
"""Larger values count as not finite, since their range overflows."""
POINTS_A_COLUMN = 4
NOT_DRAWN = {"step", "epoch", "hp_metric"}
_LOSS = re.compile(r"(?:^|[^a-z])loss(?:$|[^a-z])|[a-z]loss(?:$|[^a-z])", re.IGNORECASE)
_RATE = re.compile(r"(?:^|[^a-z])(?:lr|learning_rate)(?:$|[^a-z])", re.IGNORECASE)
_SPEED = re.compile(r"_per_sec(?:ond)?$|(?:^|/)(?:mfu|data_wait|throughput)$", re.IGNORECASE)
_STAGE = re.compile(r"^(?:train(?:ing)?|val(?:id)?(?:ation)?|test)[_/.-]|_(?:step|epoch)$|/dataloader_idx_\d+")
_STAGES = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}
"""The colors of the stages, by words in a metric's name."""


class LoggedSeries(Protocol):
    """The values of one metric, in the order of its steps."""

    @property
    def values(self) -> Numbers: ...


class LoggedRun(Protocol):
    """The metrics of one run by name. `trainwright.history.History` has this form."""

    @property
    def folder(self) -> str: ...
    @property
    def series(self) -> Mapping[str, LoggedSeries]: ...
    @property
    def problems(self) -> Sequence[str]: ...
    def x_of(self, series: Any, axis: str) -> Numbers:
        """Return the x values of a series, or raise ValueError if the run's files do not contain them."""


def names_of_runs(folders: list[str]) -> list[str]:
    """Return short names that distinguish folders: their paths without the common part."""
    parts = [[part for part in folder.split("/") if part] for folder in folders]
    if len(folders) == 1:
        return ["/".join(parts[0][-2:]) or folders[0]]
    shared = 0
    while all(len(path) > shared + 1 for path in parts) and len({path[shared] for path in parts}) == 1:
        shared += 1
    return ["/".join(path[shared:]) for path in parts]


@dataclass(frozen=True)
class Curve:
    """One metric of one run, in the order of x. Values that are not finite are NaN, and leave gaps."""

    run: str
    metric: str
    x: Numbers
    y: Numbers
    num_bad: int
    color: int
    """The index in a list of colors, and of dashes."""
    dash: int

    @property
    def label(self) -> str:
        """Return the text in the legend."""
        name = f"{self.run}: {self.metric}" if self.run else self.metric
        return f"{name} ({self.num_bad:,} not finite)" if self.num_bad else name


@dataclass(frozen=True)
class Panel:
    """The curves over one y axis."""

    group: str
    title: str
    curves: tuple[Curve, ...]

    @property
    def x_range(self) -> tuple[float, float]:
        return _range([curve.x for curve in self.curves], margin=1.0)

    @property
    def y_range(self) -> tuple[float, float]:
        """Return the range of the y axis, with a margin."""
        low, high = _range([curve.y for curve in self.curves])
        margin = (high / 2 - low / 2) * 0.1
        return low - margin, high + margin

    def logarithmic(self) -> Panel | None:
        """Return the panel with logarithms of its positive values, or None if there are none."""
        curves = tuple(replace(curve, y=np.log10(np.where(curve.y > 0, curve.y, np.nan))) for curve in self.curves)
        return replace(self, curves=curves) if any(np.isfinite(curve.y).any() for curve in curves) else None


def panels_of(histories: Sequence[LoggedRun], metrics: Sequence[str] | None = None, axis: str = "step") -> list[Panel]:
    """Return the panels of runs, with these metrics or all, by group and name.

    Raises:
        ValueError: there is nothing to draw, or the runs' files lack the axis.
    """
    runs = names_of_runs([history.folder for history in histories])
    names = list(dict.fromkeys(name for history in histories for name in history.series))
    chosen = [name for name in names if (name not in NOT_DRAWN if metrics is None else name in metrics)]
    titles = [(*_panel_of(name), name) for name in chosen]
    together: dict[tuple[int, str], list[str]] = {}
    for group, title, name in sorted(titles, key=lambda entry: (entry[0], entry[1].lower())):
        together.setdefault((group, title), []).append(name)
    panels = []
    for (group, title), members in together.items():
        # Of one run, the color is the stage. Of several, the color is the run and the dash the metric.
        looks = _looks(members)
        curves = [
            _curve(history, name, axis, run if len(runs) > 1 else "", (number, at) if len(runs) > 1 else looks[at])
            for number, (run, history) in enumerate(zip(runs, histories, strict=True))
            for at, name in enumerate(members)
            if name in history.series
        ]
        curves = [curve for curve in curves if len(curve.x)]
        if curves:
            panels.append(Panel(GROUPS[group], title if len(members) > 1 or group == 0 else members[0], tuple(curves)))
    if not panels:
        of = "these runs" if len(histories) > 1 else histories[0].folder if histories else "no run"
        raise ValueError(f"there is nothing to draw: {of} has no rows of numbers yet. Log metrics with self.log first.")
    return panels


def _looks(names: Sequence[str]) -> list[tuple[int, int]]:
    """Return the colors and dashes of a panel's metrics. A stage has the same color in all panels."""
    words = [re.split(r"[_/.-]", name.lower()) for name in names]
    stages = [next((_STAGES[word] for word in name if word in _STAGES), None) for name in words]
    others = iter([*({0} - set(stages)), *range(3, 3 + len(names))])  # of metrics that name no stage
    colors = [next(others) if stage is None else stage for stage in stages]
    return [(color, colors[:at].count(color)) for at, color in enumerate(colors)]


def _curve(history: LoggedRun, name: str, axis: str, run: str, look: tuple[int, int]) -> Curve:
    series = history.series[name]
    x = history.x_of(series, axis)
    order = np.argsort(x, kind="stable")
    y = np.where(np.abs(series.values) <= LARGEST, series.values, np.nan)[order]
    return Curve(run, name, x[order], y, int(np.isnan(y).sum()), *look)


def smoothed(curve: Curve) -> Curve:
    """Return the moving average over a twentieth of the curve, and at least three values."""
    half, at, is_finite = max(1, len(curve.y) // 40), np.arange(len(curve.y)), ~np.isnan(curve.y)
    first, end = np.maximum(at - half, 0), np.minimum(at + half + 1, len(at))
    sums, counts = (np.cumsum([0.0, *terms]) for terms in (np.where(is_finite, curve.y, 0.0), is_finite))
    means = (sums[end] - sums[first]) / np.maximum(counts[end] - counts[first], 1.0)
    return replace(curve, y=np.where(is_finite, means, np.nan))


def _panel_of(name: str) -> tuple[int, str]:
    if _SPEED.search(name):
        return GROUPS.index(THROUGHPUT), re.split(r"/", name)[-1]
    if _RATE.search(name):
        kind = re.search(r"-(momentum|weight_decay)$", name)
        return GROUPS.index(RATES), kind[1] if kind else "learning rate"
    if _LOSS.search(name):
        return GROUPS.index(LOSS), "loss"
    return GROUPS.index(METRICS), _STAGE.sub("", _STAGE.sub("", name)) or name


def _range(arrays: Sequence[Numbers], margin: float | None = None) -> tuple[float, float]:
    """Return the range of the finite numbers, or 0 and 1. A single number gets a margin on both sides."""
    finite = np.concatenate([array[np.isfinite(array)] for array in arrays])
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    if high / 2 - low / 2 > abs(high) * 1e-12:
        return low, high
    margin = margin or abs(high) * 0.05 or 0.5
    return low - margin, high + margin


def line_of(curve: Curve, x_range: tuple[float, float], columns: int) -> list[tuple[Numbers, Numbers]]:
    """Return the parts of a curve between gaps. A long curve is thinned per column.

    A column keeps its first, smallest, largest and last value. The others lie between these, so the picture stays the same. A
    column with a gap ends its part.
    """
    x, y = curve.x, curve.y
    if len(x) <= POINTS_A_COLUMN * columns:
        ends = np.flatnonzero(np.isnan(y))
        parts = [(x[~np.isnan(y)], y[~np.isnan(y)]) for x, y in zip(np.split(x, ends), np.split(y, ends), strict=True)]
        return [part for part in parts if len(part[0])]
    low, high = x_range
    column = np.clip(((x - low) / (high - low) * columns).astype(int), 0, columns - 1)
    starts = [0, *(np.flatnonzero(np.diff(column)) + 1).tolist(), len(x)]
    runs: list[list[int]] = [[]]
    for start, end in pairwise(starts):
        finite = start + np.flatnonzero(~np.isnan(y[start:end]))
        if len(finite):
            least, greatest = finite[np.argmin(y[finite])], finite[np.argmax(y[finite])]
            runs[-1] += sorted({int(finite[0]), int(least), int(greatest), int(finite[-1])})
        if len(finite) < end - start:
            runs.append([])
    return [(x[part], y[part]) for part in runs if part]


def thinning_of(panels: Sequence[Panel], columns: int) -> str:
    """Return a sentence on how long curves are thinned, or "" if all points are drawn."""
    most = max(len(curve.x) for panel in panels for curve in panel.curves)
    if most <= POINTS_A_COLUMN * columns:
        return ""
    return (
        f"Long curves (up to {most:,} points) are drawn from the first, smallest, largest and last value in {columns} columns, "
        "so that no peak is lost."
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers within a range, about `count` of them."""
    half = high / 2 - low / 2
    raw = half / count * 2
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= raw * 0.999), 10 * power)
    first = math.ceil(low / step - 1e-9)
    last = min(math.floor(high / step + 1e-9), first + 3 * count)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return logarithms of round numbers within a range of logarithms."""
    low, high = max(low, -300.0), min(high, 300.0)  # the limits of floats
    powers = range(math.floor(low), math.ceil(high) + 1)
    if len(powers) < 3:
        return [math.log10(tick) for tick in ticks(10**low, 10**high, 5)]
    factors = (1, 2, 5) if len(powers) < 6 else (1,)
    logarithms = (power + math.log10(factor) for power in powers[:: 1 + len(powers) // 12] for factor in factors)
    return [tick for tick in logarithms if low <= tick <= high]
