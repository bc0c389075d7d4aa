"""Drawing: the one function that makes a page or an image of runs, and the formats."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from trainwright.plots.curves import panels_of
from trainwright.plots.logged import AXES, LoggedRun

FORMATS = (".html", ".png")
"""The formats, by the end of a file's name."""


def checked_format(path: str) -> str:
    """Return the format that a path's name asks for (ValueError if it is none of ours)."""
    found = next((each for each in FORMATS if path.lower().endswith(each)), None)
    if found is None:
        raise ValueError(
            f"{path!r} does not say what to draw: expected names that end in {' or '.join(FORMATS)}. Give such a name."
        )
    return found


def checked_metrics(histories: Sequence[LoggedRun], metrics: Sequence[str]) -> list[str]:
    """Return the metrics to draw (TypeError, or ValueError if a name is in none of the runs)."""
    if isinstance(metrics, str) or not all(isinstance(each, str) for each in metrics):
        raise TypeError(f"metrics={metrics!r:.80} is not accepted; pass a list of the names of metrics.")
    known = list(dict.fromkeys(name for each in histories for name in each.series))
    for each in metrics:
        if each not in known:
            choice = f"choose from {', '.join(known)}" if known else "the runs have no rows yet"
            names = {name.lower(): name for name in known}
            close = difflib.get_close_matches(each.lower(), names, n=1)
            hint = f" Did you mean {names[close[0]]!r}?" if close else ""
            raise ValueError(f"the metric {each!r} was not logged; {choice}.{hint}")
    return list(dict.fromkeys(metrics))


def draw(histories: Sequence[LoggedRun], form: str, metrics: Sequence[str] | None = None, axis: str = "step") -> bytes:
    """Return the curves of runs as the bytes of a file: one self-contained page (".html") or an image (".png").

    Raises:
        ValueError: there is nothing to draw, a metric or the axis is unknown, or the runs' files do not say the axis.
        ImportError: an image needs matplotlib.
    """
    if axis not in AXES:
        raise ValueError(f"x={axis!r} is unknown; choose from {', '.join(AXES)}.")
    panels = panels_of(histories, None if metrics is None else checked_metrics(histories, metrics), axis)
    problems = [problem for each in histories for problem in each.problems]
    if form == ".png":
        from trainwright.plots.image import image_of

        return image_of(panels, axis)
    from trainwright.plots.page import page_of

    return page_of(panels, axis, [each.folder for each in histories], problems).encode()
