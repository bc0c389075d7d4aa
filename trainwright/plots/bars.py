"""Bars: a chart of horizontal bars, as a part of a page or as a PNG."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainwright.plots.curves import ticks
from trainwright.plots.page import COLORS, escaped

WIDTH, LEFT, RIGHT = 760, 170, 150
BAR, GAP, BOTTOM = 20, 10, 40
INCHES_A_BAR, DOTS_AN_INCH = 0.42, 110


class Bar(NamedTuple):
    """A bar. If it has no value, only its text is shown."""

    label: str
    value: float | None
    text: str
    """The text at its end."""
    spread: float | None = None
    """The standard deviation of its value."""
    is_marked: bool = False
    """Whether it has another color than the others."""


def bars_of(bars: Sequence[Bar], axis: str) -> Iterator[str]:
    """Yield the lines of the chart in SVG. `axis` is the measured quantity."""
    most = _most(bars)
    width, height = WIDTH - LEFT - RIGHT, len(bars) * (BAR + GAP) + BOTTOM
    bottom = height - BOTTOM

    def at(value: float) -> float:
        return round(LEFT + width * value / most, 2)

    yield f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escaped(axis)}" style="max-width: {WIDTH}px">'
    for value in ticks(0.0, most, 5):
        yield f'<line class="grid" x1="{at(value)}" x2="{at(value)}" y1="0" y2="{bottom}"/>'
        yield f'<text x="{at(value)}" y="{bottom + 16}" text-anchor="middle">{value:.5g}</text>'
    yield f'<text x="{LEFT + width / 2}" y="{height - 6}" text-anchor="middle">{escaped(axis)}</text>'
    for number, bar in enumerate(bars):
        top = number * (BAR + GAP) + GAP / 2
        middle, end = top + BAR / 2, float(LEFT)
        yield f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{escaped(bar.label)}</text>'
        if bar.value is not None:
            color = COLORS[1 if bar.is_marked else 0]
            end = at(bar.value)
            yield f'<rect x="{LEFT}" y="{top}" width="{round(end - LEFT, 2)}" height="{BAR}" fill="{color}"/>'
            if bar.spread:
                low, end = at(max(0.0, bar.value - bar.spread)), at(bar.value + bar.spread)
                yield f'<line x1="{low}" x2="{end}" y1="{middle}" y2="{middle}" stroke="currentColor" stroke-width="2"/>'
        yield f'<text x="{end + 8}" y="{middle + 4}">{escaped(bar.text)}</text>'
    yield "</svg>"


def bars_image(bars: Sequence[Bar], axis: str) -> bytes:
    """Return the chart as a PNG; ImportError if matplotlib is missing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + INCHES_A_BAR * len(bars)), dpi=DOTS_AN_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    heights = range(len(bars))
    colors = [COLORS[1 if bar.is_marked else 0] for bar in bars]
    axes.barh(heights, [bar.value or 0.0 for bar in bars], xerr=[bar.spread or 0.0 for bar in bars], color=colors)
    for height, bar in zip(heights, bars, strict=True):
        axes.annotate(bar.text, ((bar.value or 0.0) + (bar.spread or 0.0), height), (6, 0), textcoords="offset points",
                      va="center", fontsize=8, parse_math=False)  # fmt: skip
    axes.set_yticks(heights, [bar.label for bar in bars], fontsize=9, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.35 * _most(bars))
    axes.set_xlabel(axis, fontsize=9)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _most(bars: Sequence[Bar]) -> float:
    return max(((bar.value or 0.0) + (bar.spread or 0.0) for bar in bars), default=0.0) or 1.0
