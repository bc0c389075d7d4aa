"""Drawing: the curves of runs as a page or an image, and the formats. bars.py has the chart of a ladder."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from trainwright.plots.curves import AXES, LoggedRun, panels_of

FORMATS = (".html", ".png")
"""The formats, by the ending of a file's name."""


def checked_format(path: str) -> str:
    """Return the format of a path; ValueError if its ending is not a format."""
    form = next((form for form in FORMATS if path.lower().endswith(form)), None)
    if form is None:
        raise ValueError(f"{path!r} has no known format; pass a name that ends in {' or '.join(FORMATS)}.")
    return form


def draw(histories: Sequence[LoggedRun], form: str, metrics: Sequence[str] | None = None, axis: str = "step") -> bytes:
    """Return the curves of runs as the bytes of a file: a self-contained page (".html") or an image (".png").

    Raises:
        ValueError: there is nothing to draw, a metric or the axis is unknown, or the runs' files lack the axis.
        ImportError: an image needs matplotlib.
    """
    if axis not in AXES:
        raise ValueError(f"x={axis!r} is unknown; choose from {', '.join(AXES)}.")
    panels = panels_of(histories, None if metrics is None else checked_metrics(histories, metrics), axis)
    problems = [problem for history in histories for problem in history.problems]
    if form == ".png":
        from trainwright.plots.image import image_of

        return image_of(panels, axis)
    from trainwright.plots.page import page_of

    return page_of(panels, axis, [history.folder for history in histories], problems).encode()


def checked_metrics(histories: Sequence[LoggedRun], metrics: Sequence[str]) -> list[str]:
    """Return the metrics to draw; TypeError if they are not a list of names, ValueError if no run has one."""
    if isinstance(metrics, str) or not all(isinstance(metric, str) for metric in metrics):
        raise TypeError(f"metrics={metrics!r:.80} is not accepted; pass a list of the names of metrics.")
    known = list(dict.fromkeys(name for history in histories for name in history.series))
    for metric in metrics:
        if metric not in known:
            choice = f"choose from {', '.join(known)}" if known else "the runs have no rows yet"
            names = {name.lower(): name for name in known}
            close = difflib.get_close_matches(metric.lower(), names, n=1)
            hint = f" Did you mean {names[close[0]]!r}?" if close else ""
            raise ValueError(f"the metric {metric!r} was not logged; {choice}.{hint}")
    return list(dict.fromkeys(metrics))
