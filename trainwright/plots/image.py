"""The image: a PNG by matplotlib's objects, which do not change the pyplot state of a user's program."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

from trainwright.plots.curves import Curve, Panel, line_of, thinning_of
from trainwright.plots.page import COLORS

COLUMNS = 2
PANEL_INCHES = 6.4, 3.6
DOTS_AN_INCH = 110
THINNED_TO = 600
"""The columns to which a long curve is thinned, about one per dot."""
MOST_PANELS = 200
DASHES = ("-", "--", ":", "-.", (0, (8, 2, 1, 2)))


def image_of(panels: Sequence[Panel], axis: str) -> bytes:
    """Return the panels as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are too many panels for one image.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'A PNG needs matplotlib: pip install "trainwright[plot]", or pass a name that ends in .html, which needs nothing.'
        ) from error
    if len(panels) > MOST_PANELS:
        raise ValueError(f"{len(panels)} panels are more than the {MOST_PANELS} of one image. Choose metrics or .html.")
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about letters that the font lacks
        figure = Figure(
            figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows), dpi=DOTS_AN_INCH, layout="constrained"
        )
        FigureCanvasAgg(figure)
        for number, panel in enumerate(panels):
            _draw(figure.add_subplot(rows, columns, number + 1), panel, axis)
        if note := thinning_of(panels, THINNED_TO):
            figure.supxlabel(note, fontsize=7)
        data = io.BytesIO()
        figure.savefig(data, format="png")
    return data.getvalue()


def _draw(axes: Any, panel: Panel, axis: str) -> None:
    handles = [_curve(axes, curve, panel) for curve in panel.curves]
    axes.set_xlim(*panel.x_range)
    axes.set_ylim(*panel.y_range)
    axes.margins(0)
    title = panel.group if panel.title.lower() == panel.group.lower() else f"{panel.group}: {panel.title}"
    axes.set_title(_shown(title), fontsize=10, loc="left", parse_math=False)
    axes.set_xlabel(axis, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(True, alpha=0.3)
    legend = axes.legend(
        handles,
        [str(number) for number in range(len(handles))],
        fontsize=7,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=2 if len(handles) > 3 else 1,
        frameon=False,
    )
    # Set afterwards: matplotlib skips labels that begin with "_", and reads "$" as mathematics.
    for text, curve in zip(legend.get_texts(), panel.curves, strict=True):
        text.set_parse_math(False)
        text.set_text(_shown(curve.label))


def _curve(axes: Any, curve: Curve, panel: Panel) -> Any:
    """Draw the parts of a curve, and return its line in the legend."""
    from matplotlib.lines import Line2D

    look: dict[str, Any] = {
        "color": COLORS[curve.color % len(COLORS)],
        "linestyle": DASHES[curve.dash % len(DASHES)],
        "linewidth": 1.3,
    }
    for xs, ys in line_of(curve, panel.x_range, THINNED_TO):
        dot: dict[str, Any] = {"marker": "o", "markersize": 3, "clip_on": False} if len(xs) == 1 else {}
        axes.plot(xs, ys, **look, **dot)
    return Line2D([], [], **look)


def _shown(text: str) -> str:
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
