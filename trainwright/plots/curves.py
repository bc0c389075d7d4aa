"""Curves: which metrics are in one panel, what a curve is called, and how many of its points are drawn."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from trainwright.plots.logged import LoggedRun, Numbers, names_of_runs

LOSS, METRICS, RATES, THROUGHPUT = "Loss", "Metrics", "Learning rate", "Throughput"
GROUPS = (LOSS, METRICS, RATES, THROUGHPUT)
LARGEST = 1e300
"""A larger value counts as one that is not finite: a range of such values is itself infinite."""
POINTS_A_COLUMN = 4
NOT_DRAWN = {"step", "epoch", "hp_metric"}
_LOSS = re.compile(r"(?:^|[^a-z])loss(?:$|[^a-z])|[a-z]loss(?:$|[^a-z])", re.IGNORECASE)
_RATE = re.compile(r"(?:^|[^a-z])(?:lr|learning_rate)(?:$|[^a-z])", re.IGNORECASE)
_SPEED = re.compile(r"_per_sec(?:ond)?$|(?:^|/)(?:mfu|data_wait|throughput)$", re.IGNORECASE)
_STAGE = re.compile(r"^(?:train(?:ing)?|val(?:id)?(?:ation)?|test)[_/.-]|_(?:step|epoch)$|/dataloader_idx_\d+")
_STAGES = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}
"""The color of each stage, by the words of a metric's name."""


@dataclass(frozen=True)
class Curve:
    """One metric of one run, in the order of x; values that are not finite are NaN, and leave gaps."""

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
        """Return what the legend says."""
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
        """Return the panel with logarithms of its values, without those up to 0; None if none is left."""
        curves = tuple(replace(each, y=np.log10(np.where(each.y > 0, each.y, np.nan))) for each in self.curves)
        return replace(self, curves=curves) if any(np.isfinite(each.y).any() for each in curves) else None


def panels_of(histories: Sequence[LoggedRun], metrics: Sequence[str] | None = None, axis: str = "step") -> list[Panel]:
    """Return the panels of one or several runs, with the given metrics or all, by group and name.

    Raises:
        ValueError: there is nothing to draw, or the runs' files do not say the axis.
    """
    runs = names_of_runs([each.folder for each in histories])
    names = list(dict.fromkeys(name for each in histories for name in each.series))
    chosen = [name for name in names if (name not in NOT_DRAWN if metrics is None else name in metrics)]
    titles = dict.fromkeys(
        sorted(((*_panel_of(name), name) for name in chosen), key=lambda each: (each[0], each[1].lower()))
    )
    together: dict[tuple[int, str], list[str]] = {}
    for group, title, name in titles:
        together.setdefault((group, title), []).append(name)
    panels = []
    for (group, title), members in together.items():
        # One run: a color for each stage. Several: a color for each run, and a dash for each metric.
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
    """Return the color and the dash of each metric of a panel: a stage has the same color in all panels."""
    words = [re.split(r"[_/.-]", name.lower()) for name in names]
    stages = [next((_STAGES[each] for each in found if each in _STAGES), None) for found in words]
    others = iter([*({0} - set(stages)), *range(3, 3 + len(names))])  # of metrics that name no stage
    colors = [next(others) if each is None else each for each in stages]
    return [(color, colors[:at].count(color)) for at, color in enumerate(colors)]


def _curve(history: LoggedRun, name: str, axis: str, run: str, look: tuple[int, int]) -> Curve:
    series = history.series[name]
    x = history.x_of(series, axis)
    order = np.argsort(x, kind="stable")
    y = np.where(np.abs(series.values) <= LARGEST, series.values, np.nan)[order]
    return Curve(run, name, x[order], y, int(np.isnan(y).sum()), *look)


def smoothed(curve: Curve) -> Curve:
    """Return the curve of means, each of a twentieth of the curve around a value, and of at least three values."""
    half, at, is_finite = max(1, len(curve.y) // 40), np.arange(len(curve.y)), ~np.isnan(curve.y)
    first, end = np.maximum(at - half, 0), np.minimum(at + half + 1, len(at))
    sums, counts = (np.cumsum([0.0, *each]) for each in (np.where(is_finite, curve.y, 0.0), is_finite))
    means = (sums[end] - sums[first]) / np.maximum(counts[end] - counts[first], 1.0)
    return replace(curve, y=np.where(is_finite, means, np.nan))


def _panel_of(name: str) -> tuple[int, str]:
    """Return the group of a metric and the title of its panel."""
    if _SPEED.search(name):
        return GROUPS.index(THROUGHPUT), re.split(r"/", name)[-1]
    if _RATE.search(name):
        kind = re.search(r"-(momentum|weight_decay)$", name)
        return GROUPS.index(RATES), kind[1] if kind else "learning rate"
    if _LOSS.search(name):
        return GROUPS.index(LOSS), "loss"
    return GROUPS.index(METRICS), _STAGE.sub("", _STAGE.sub("", name)) or name


def _range(arrays: Sequence[Numbers], margin: float | None = None) -> tuple[float, float]:
    """Return the smallest and the largest finite number; without any, 0 and 1. A single number gets a margin on both sides."""
    finite = [each[np.isfinite(each)] for each in arrays]
    finite = [each for each in finite if len(each)]
    if not finite:
        return 0.0, 1.0
    low, high = float(min(each.min() for each in finite)), float(max(each.max() for each in finite))
    if high / 2 - low / 2 > abs(high) * 1e-12:
        return low, high
    margin = margin or abs(high) * 0.05 or 0.5
    return low - margin, high + margin


@dataclass(frozen=True)
class Line:
    """What is drawn of a curve: its parts between gaps, each of one point or more."""

    parts: tuple[tuple[Numbers, Numbers], ...]
    is_thinned: bool = False


def line_of(curve: Curve, x_range: tuple[float, float], columns: int) -> Line:
    """Return the parts of a curve; of a long one, for each of `columns` columns its first, smallest, largest and last values.

    What is left out lies between these, so that the picture is that of all points. A column that holds a gap ends its part.
    """
    x, y = curve.x, curve.y
    if len(x) <= POINTS_A_COLUMN * columns:
        ends = np.flatnonzero(np.isnan(y))
        parts = [
            (xs[~np.isnan(ys)], ys[~np.isnan(ys)]) for xs, ys in zip(np.split(x, ends), np.split(y, ends), strict=True)
        ]
        return Line(tuple(part for part in parts if len(part[0])))
    low, high = x_range
    column = np.clip(((x - low) / (high - low) * columns).astype(int), 0, columns - 1)
    starts = [0, *(np.flatnonzero(np.diff(column)) + 1).tolist(), len(x)]
    found: list[list[int]] = [[]]
    for start, end in pairwise(starts):
        finite = start + np.flatnonzero(~np.isnan(y[start:end]))
        if len(finite):
            least, greatest = finite[np.argmin(y[finite])], finite[np.argmax(y[finite])]
            found[-1] += sorted({int(finite[0]), int(least), int(greatest), int(finite[-1])})
        if len(finite) < end - start:
            found.append([])
    return Line(tuple((x[part], y[part]) for part in found if part), is_thinned=True)


def thinning_of(panels: Sequence[Panel], columns: int) -> str:
    """Return a sentence on how long curves are drawn; "" if all points are."""
    most = max(len(curve.x) for panel in panels for curve in panel.curves)
    if most <= POINTS_A_COLUMN * columns:
        return ""
    return (
        f"Long curves (up to {most:,} points) are drawn from the first, smallest, largest and last value in each of {columns} "
        "columns, so that no peak is lost."
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers within a range, about `count` of them."""
    half = high / 2 - low / 2
    raw = half / count * 2
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= raw * 0.999), 10 * power)
    first = math.ceil(low / step - 1e-9)
    found: list[float] = []
    while (first + len(found)) * step <= high + step * 1e-9 and len(found) <= 3 * count:
        found.append((first + len(found)) * step)
    return found


def log_ticks(low: float, high: float) -> list[float]:
    """Return logarithms of round numbers within a range of logarithms."""
    low, high = max(low, -300.0), min(high, 300.0)  # beyond which no float is
    powers = range(math.floor(low), math.ceil(high) + 1)
    if len(powers) < 3:
        return [math.log10(each) for each in ticks(10**low, 10**high, 5)]
    factors = (1, 2, 5) if len(powers) < 6 else (1,)
    found = [power + math.log10(factor) for power in powers[:: 1 + len(powers) // 12] for factor in factors]
    return [each for each in found if low <= each <= high]


def x_label(axis: str, seconds: float) -> tuple[str, float]:
    """Return the name of the x axis, and the number that its values are divided by."""
    if axis != "time":
        return axis, 1.0
    unit, size = next(
        (each for each in (("hours", 3600.0), ("minutes", 60.0)) if seconds > 2 * each[1]), ("seconds", 1.0)
    )
    return f"time in {unit}", size
