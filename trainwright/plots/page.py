"""The page of curves and the report of a run: one HTML file with inline SVG, which loads nothing and runs no script."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from trainwright.plots.curves import Curve, Panel, line_of, log_ticks, names_of_runs, smoothed, thinning_of, ticks

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 40
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
BANDS = 80
"""Columns that show the values below the pointer."""
SMOOTH_COLUMNS = PLOT_WIDTH // 4
"""The columns to which a long smooth curve is thinned. It has no peaks to lose."""
MOST_VALUES = 24
"""The number of curves whose values a band shows."""
COLORS = ("#3b7dd8", "#e0762f", "#3c9f5f", "#c94c5b", "#8c6bc8", "#8a6d4b", "#d465a8", "#7f8790", "#a6a02c", "#2ba7b5")
"""Colors that are visible on light and dark paper."""
DASHES = ("", "7 4", "2 3", "10 3 2 3", "14 5")
MOST_ROWS = 500
"""The largest number of shown rows of a table."""
LONGEST_CELL, LONGEST_TEXT = 2_000, 40_000
"""The largest numbers of shown characters."""
GENERATOR = '<meta name="generator" content="trainwright">'
"""Marks a page that trainwright wrote."""
STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1d2126; --soft: #626b75; --grid: #dfe3e8; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e6e9ec; --soft: #9aa4ae; --grid: #30363d; } }
body { margin: 1.5rem; background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
p, li, figcaption { overflow-wrap: anywhere; } ul { list-style: none; margin: .3rem 0; padding: 0; }
.soft { color: var(--soft); }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; margin-left: 4rem; } figure ul { margin-left: 4rem; }
svg { display: block; width: 100%; height: auto; } svg.key { display: inline-block; width: 30px; height: 10px; }
svg text { fill: var(--soft); font-size: 12px; } .grid { stroke: var(--grid); stroke-width: 1; }
.curve { fill: none; stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round; }
table { border-collapse: collapse; margin: .3rem 0 .8rem; }
th, td { text-align: left; vertical-align: top; padding: .15rem 1.2rem .15rem 0; overflow-wrap: anywhere; }
th { overflow-wrap: normal; } th[scope=row] { min-width: 9rem; font-weight: 400; color: var(--soft); }
pre { overflow-x: auto; font-size: 12px; }
pre.wrapped { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
.state { border: 1px solid currentColor; border-radius: 1rem; padding: .1rem .7rem; font-weight: 600; }
.finished { color: #3c9f5f; } .stopped { color: #c98a1b; } .failed, .NaN { color: #c94c5b; }
.log, .smooth, #log:checked ~ .panels .linear { display: none; }
#log:checked ~ .panels .log, #smooth:checked ~ .panels .smooth { display: inline; }
#smooth:checked ~ .panels .raw { stroke-opacity: .25; fill-opacity: .25; } label { margin-right: 1rem; }
.band { fill: var(--ink); fill-opacity: 0; } .band:hover { fill-opacity: .12; }
""".strip()


def page_of(panels: Sequence[Panel], axis: str, folders: Sequence[str], problems: Sequence[str] = ()) -> str:
    runs = names_of_runs(list(folders))
    title = f"Curves of {runs[0]}" if len(runs) == 1 else f"Curves of {len(runs)} runs"
    lines = ["<ul>"]
    for number, (run, folder) in enumerate(zip(runs, folders, strict=True)):
        key = _key(number, 0) if len(runs) > 1 else ""
        lines.append(f'<li>{key} {escaped(run)} <span class="soft">{escaped(folder)}</span></li>')
    lines.append("</ul>")
    lines += [f"<p>{escaped(problem)}</p>" for problem in problems]
    return document(title, [*lines, *curves_of(panels, axis)])


def document(title: str, lines: Sequence[str]) -> str:
    """Return a page from a title and the HTML lines of its body."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            # The page loads nothing, so a browser may block anything that a name could smuggle in.
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            GENERATOR,
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escaped(title)}</title>",
            f"<style>{STYLE}</style></head><body>",
            f"<h1>{escaped(title)}</h1>",
            *lines,
            "</body></html>",
            "",
        ]
    )


def curves_of(panels: Sequence[Panel], axis: str) -> Iterator[str]:
    """Yield the lines of panels under their groups. Two check boxes switch curves by CSS."""
    if note := thinning_of(panels, PLOT_WIDTH):
        yield f'<p class="soft">{note}</p>'
    yield '<input type="checkbox" id="smooth"><label for="smooth">Smooth</label>'
    yield '<input type="checkbox" id="log"><label for="log">Log axis</label>'
    yield '<span class="soft">Point at a panel to see the values there.</span>'
    for group, members in groupby(panels, lambda panel: panel.group):
        yield f"<h2>{escaped(group)}</h2>"
        yield '<div class="panels">'
        for panel in members:
            yield from _figure(panel, axis)
        yield "</div>"


def _figure(panel: Panel, axis: str) -> Iterator[str]:
    yield f"<figure><figcaption>{escaped(panel.title)}</figcaption>"
    yield f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(panel.title)}">'
    left, right = panel.x_range
    for value in ticks(left, right, 6):
        at = _x(value, left, right)
        yield f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        yield f'<text x="{at}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:.10g}</text>'
    yield f'<text x="{LEFT + PLOT_WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{axis}</text>'
    if (logarithmic := panel.logarithmic()) is not None:
        yield from _lines("log", logarithmic, {tick: f"{10**tick:.5g}" for tick in log_ticks(*logarithmic.y_range)})
    labels = {tick: f"{tick:.5g}" for tick in ticks(*panel.y_range, 5)}
    yield from _lines("linear" if logarithmic else "", panel, labels)
    yield from _bands(panel, axis)
    yield "</svg><ul>"
    for curve in panel.curves:
        finite = curve.y[~np.isnan(curve.y)]
        values = f"last {finite[-1]:.5g}, min {finite.min():.5g}, max {finite.max():.5g}" if len(finite) else "no value"
        yield f'<li>{_key(curve.color, curve.dash)} {escaped(curve.label)} <span class="soft">{values}</span></li>'
    yield "</ul></figure>"


def _lines(axis: str, panel: Panel, labels: Mapping[float, str]) -> Iterator[str]:
    """Draw the y axis, the curves and the smooth curves."""
    yield f'<g class="{axis}">'
    for value, label in labels.items():
        at = _y(value, *panel.y_range)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
    for curve in panel.curves:
        yield f'<g class="raw">{"".join(_drawn(curve, panel, PLOT_WIDTH))}</g>'
        yield f'<g class="smooth">{"".join(_drawn(smoothed(curve), panel, SMOOTH_COLUMNS))}</g>'
    yield "</g>"


def _drawn(curve: Curve, panel: Panel, columns: int) -> Iterator[str]:
    """Draw a curve as a path, and parts of one point as dots, which a path does not show."""
    (left, right), (low, high) = panel.x_range, panel.y_range
    color = COLORS[curve.color % len(COLORS)]
    path = []
    for xs, ys in line_of(curve, panel.x_range, columns):
        points = [f"{_x(x, left, right)} {_y(y, low, high)}" for x, y in zip(xs.tolist(), ys.tolist(), strict=True)]
        if len(points) == 1:
            x, y = points[0].split()
            yield f'<circle cx="{x}" cy="{y}" r="2.5" fill="{color}"/>'
        else:
            path.append("M" + "L".join(points))
    if path:
        yield f'<path class="curve" stroke="{color}"{_dash(curve.dash)} d="{"".join(path)}"/>'


def _bands(panel: Panel, axis: str) -> Iterator[str]:
    """Draw transparent columns. Browsers show their titles, which have the nearest value of every curve."""
    left, right = panel.x_range
    width = PLOT_WIDTH / BANDS
    shown = []
    for curve in panel.curves[:MOST_VALUES]:
        finite = ~np.isnan(curve.y)
        name = f"{curve.run}: {curve.metric}" if curve.run else curve.metric
        shown.append((name, curve.x[finite], curve.y[finite]))
    for number in range(BANDS):
        middle = left + (right - left) * (number + 0.5) / BANDS
        lines = []
        for name, xs, ys in shown:
            if len(xs):
                after = min(int(np.searchsorted(xs, middle)), len(xs) - 1)
                at = after - 1 if after and middle - xs[after - 1] < xs[after] - middle else after
                lines.append(f"{name} = {ys[at]:.6g} at {axis} {xs[at]:.6g}")
        if len(panel.curves) > MOST_VALUES:
            lines.append(f"and {len(panel.curves) - MOST_VALUES} more")
        yield (
            f'<rect class="band" x="{LEFT + number * width:.2f}" y="{TOP}" width="{width:.2f}" height="{PLOT_HEIGHT}">'
            f"<title>{escaped(chr(10).join(lines), keeps_lines=True)}</title></rect>"
        )


def _key(color: int, dash: int) -> str:
    """Return a piece of line for the legend."""
    return (
        '<svg class="key" viewBox="0 0 30 10" aria-hidden="true"><path class="curve" d="M1 5H29" '
        f'stroke="{COLORS[color % len(COLORS)]}"{_dash(dash)}/></svg>'
    )


def _dash(dash: int) -> str:
    shown = DASHES[dash % len(DASHES)]
    return f' stroke-dasharray="{shown}"' if shown else ""


def _x(value: float, low: float, high: float) -> float:
    return round(LEFT + (value - low) / (high - low) * PLOT_WIDTH, 2)


def _y(value: float, low: float, high: float) -> float:
    # Halves, since the range of very large numbers overflows.
    return round(TOP + (high / 2 - value / 2) / (high / 2 - low / 2) * PLOT_HEIGHT, 2)


def escaped(text: str, keeps_lines: bool = False) -> str:
    """Return a text as HTML. Names come from files, so they may contain anything."""
    allowed = "\n" if keeps_lines else ""
    letters = (letter if letter.isprintable() or letter in allowed else ascii(letter)[1:-1] for letter in text)
    return html.escape("".join(letters))


@dataclass(frozen=True)
class Section:
    """A part of the report: sentences, rows of cells, and a text with its line breaks.

    If there is no header, the first cell of a row names the others.
    """

    title: str
    rows: Sequence[Sequence[str]] = ()
    header: Sequence[str] = ()
    notes: Sequence[str] = ()
    text: str = ""
    wraps: bool = False
    """Whether long lines of the text are wrapped."""


@dataclass(frozen=True)
class Report:
    """The content of the report: the state, the panels of the curves, and sections around them."""

    title: str
    state: str
    summary: str
    first: Sequence[Section] = ()
    panels: Sequence[Panel] = ()
    notes: Sequence[str] = field(default=())
    """Sentences about the curves."""
    others: Sequence[Section] = ()

    def to_html(self, axis: str = "step") -> str:
        lines = [
            f'<p><span class="state {escaped(self.state.split()[-1])}">{escaped(self.state)}</span> {escaped(self.summary)}</p>'
        ]
        lines += sections_of(self.first)
        lines += [f"<p>{escaped(note)}</p>" for note in self.notes]
        lines += curves_of(self.panels, axis) if self.panels else ()
        return document(self.title, [*lines, *sections_of(self.others)])


def sections_of(sections: Sequence[Section]) -> Iterator[str]:
    """Yield the lines of sections."""
    for section in sections:
        yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{escaped(section.title)}</h2>"
    for note in section.notes:
        yield f"<p>{escaped(note)}</p>"
    if section.rows:
        yield "<table>"
        if section.header:
            yield f"<tr>{''.join(f'<th>{escaped(name)}</th>' for name in section.header)}</tr>"
        for row in section.rows[:MOST_ROWS]:
            first, *others = (_cut(cell, LONGEST_CELL) for cell in row)
            head = f"<td>{escaped(first)}</td>" if section.header else f'<th scope="row">{escaped(first)}</th>'
            yield f"<tr>{head}{''.join(f'<td>{escaped(cell)}</td>' for cell in others)}</tr>"
        yield "</table>"
        if len(section.rows) > MOST_ROWS:
            yield f'<p class="soft">and {len(section.rows) - MOST_ROWS:,} more</p>'
    if section.text:
        kind = ' class="wrapped"' if section.wraps else ""
        yield f"<pre{kind}>{escaped(_cut(section.text, LONGEST_TEXT), keeps_lines=True)}</pre>"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more characters)"
