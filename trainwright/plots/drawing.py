"""Drawing: the curves of runs as a page, and a chart of horizontal bars."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainwright.plots.curves import AXES, LoggedRun, panels_of, ticks
from trainwright.plots.page import COLORS, escaped, page_of

WIDTH, LEFT, RIGHT = 760, 170, 150
BAR, GAP, BOTTOM = 20, 10, 40


def check_page(path: str) -> None:
    """Raise ValueError unless a path ends in .html."""
    if not path.lower().endswith(".html"):
        raise ValueError(
            f"{path!r} is not accepted, since curves are drawn as a page. Pass a name that ends in .html. For an image draw "
            "the series of logger.history() with matplotlib, as in docs/loggers.md."
        )


def draw(histories: Sequence[LoggedRun], metrics: Sequence[str] | None = None, axis: str = "step") -> bytes:
    """Return the curves of runs as the bytes of a self-contained page.

    Raises:
        ValueError: there is nothing to draw, a metric or the axis is unknown, or the runs' files lack the axis.
    """
    if axis not in AXES:
        raise ValueError(f"x={axis!r} is unknown; choose from {', '.join(AXES)}.")
    panels = panels_of(histories, None if metrics is None else checked_metrics(histories, metrics), axis)
    problems = [problem for history in histories for problem in history.problems]
    return page_of(panels, axis, [history.folder for history in histories], problems).encode()


def checked_metrics(histories: Sequence[LoggedRun], metrics: Sequence[str]) -> list[str]:
    """Return the metrics to draw, or raise TypeError or ValueError."""
    if isinstance(metrics, str) or not all(isinstance(metric, str) for metric in metrics):
        raise TypeError(f"metrics={metrics!r:.80} is not accepted. Pass a list of the names of metrics.")
    known = list(dict.fromkeys(name for history in histories for name in history.series))
    for metric in metrics:
        if metric not in known:
            choice = f"choose from {', '.join(known)}" if known else "the runs have no rows yet"
            names = {name.lower(): name for name in known}
            close = difflib.get_close_matches(metric.lower(), names, n=1)
            hint = f" Did you mean {names[close[0]]!r}?" if close else ""
            raise ValueError(f"the metric {metric!r} was not logged; {choice}.{hint}")
    return list(dict.fromkeys(metrics))


class Bar(NamedTuple):
    """A bar. If it has no value, only its text is shown."""

    label: str
    value: float | None
    text: str
    """The text at its end."""
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
        yield f'<text x="{end + 8}" y="{middle + 4}">{escaped(bar.text)}</text>'
    yield "</svg>"


def _most(bars: Sequence[Bar]) -> float:
    return max((bar.value or 0.0 for bar in bars), default=0.0) or 1.0
