"""The picture of benchmarks/scale.py: the seconds of every measurement by the number of ranks, on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from scale_job import Cost

TITLES = {
    "agreement": "all ranks agree on a value",
    "stop": "all ranks agree on the step of a stop",
    "watch": "the watchers of all ranks poll once",
    "commit": "a checkpoint is committed",
}
PARTS = ("all ranks on this machine", "CPU time: the store's server", "rank 0", "another rank")
COLOURS = ("#1f77b4", "#d62728", "#ff7f0e", "#2ca02c")
WIDTH, HEIGHT, LEFT, TOP, GAP = 250, 190, 60, 60, 75
LEAST, MOST = 1e-5, 1e2
"""The seconds at the ends of the axes."""


def draw(path: Path, costs: Mapping[int, Mapping[str, Cost]]) -> None:
    """Draw a panel for each measurement, with the costs by number of ranks."""
    counts = list(costs)
    names = list(next(iter(costs.values())))
    lines = []
    for number, name in enumerate(names):
        left, top = LEFT + (number % 2) * (WIDTH + GAP), TOP + (number // 2) * (HEIGHT + GAP)
        lines += _axes(left, top, TITLES[name], counts)
        for colour, figures in zip(COLOURS, zip(*(costs[count][name] for count in counts), strict=True), strict=True):
            points = [(left + _across(index, counts), top + _down(figure)) for index, figure in enumerate(figures)]
            lines.append(_line(points, colour))
            lines += [f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="{colour}"/>' for x, y in points]
            (x, y), figure = points[-1], figures[-1]
            lines.append(f'<text x="{x + 6:.0f}" y="{y + 4:.0f}" font-size="9">{_text(figure)}</text>')
    for index, (part, colour) in enumerate(zip(PARTS, COLOURS, strict=True)):
        x = LEFT + (0, 180, 370, 440)[index]
        lines.append(
            f'<rect x="{x}" y="14" width="12" height="12" fill="{colour}"/><text x="{x + 18}" y="24">{part}</text>'
        )
    width, height = LEFT + 2 * WIDTH + GAP + 40, TOP + math.ceil(len(names) / 2) * (HEIGHT + GAP) - 20
    body = "\n".join(lines)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n',
        encoding="utf-8",
    )


def _axes(left: int, top: int, title: str, counts: Sequence[int]) -> list[str]:
    lines = [f'<text x="{left}" y="{top - 8}" font-weight="bold">{title}</text>']
    for power in range(round(math.log10(LEAST)), round(math.log10(MOST)) + 1):
        y = top + _down(10.0**power)
        lines += [
            f'<line x1="{left}" y1="{y:.0f}" x2="{left + WIDTH}" y2="{y:.0f}" stroke="#dddddd"/>',
            f'<text x="{left - 5}" y="{y + 4:.0f}" text-anchor="end">{_text(10.0**power)}</text>',
        ]
    for index, count in enumerate(counts):
        x = left + _across(index, counts)
        lines.append(f'<text x="{x:.0f}" y="{top + HEIGHT + 15}" text-anchor="middle">{count:,} ranks</text>')
    return lines


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    text = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
    return f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _across(index: int, counts: Sequence[int]) -> float:
    return WIDTH * (index + 0.5) / len(counts)


def _down(seconds: float) -> float:
    share = math.log(max(seconds, LEAST) / LEAST) / math.log(MOST / LEAST)
    return HEIGHT * (1.0 - share)


def _text(seconds: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"
