"""Chosen mode: whether a callback takes a lower or a higher value of its metric for the better one."""

from __future__ import annotations

from trainwright.metric_direction import direction_of
from trainwright.rank_zero import rank_zero_warn


def chosen_mode(mode: str | None, monitor: str | None, callback: str) -> str:
    """Return the mode, "min" if none is given; warn if the name of the metric says that more is better.

    Raises:
        ValueError: a mode that there is not.
    """
    if mode not in (None, "min", "max"):
        raise ValueError(f"mode={mode!r} is unknown; choose from min, max.")
    # The word score alone does not say it, unlike accuracy or f1_score.
    if mode is None and isinstance(monitor, str) and direction_of(monitor.replace("score", "")) == "max":
        rank_zero_warn(
            f"{callback}(monitor={monitor!r}) keeps the lowest value, as always without a mode, but the name says that higher "
            "is better: pass mode='max', or mode='min' if that is meant.",
        )
    return mode or "min"
