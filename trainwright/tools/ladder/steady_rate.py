"""Steady rate: how fast a training is once it has warmed up."""

from __future__ import annotations

from collections.abc import Sequence

FIRST_STEPS, FIRST_PART = 3, 10
"""The first three steps, or a tenth of all if that is more, are warm-up."""
OUTLIER = 5
"""A step that takes this many times the median is left out: a graph was compiled again, or a checkpoint was written."""


def steady_rate(ends: Sequence[float], amounts: Sequence[float], is_steady: Sequence[bool]) -> float | None:
    """Return the amount a second over the steady steps; None with fewer than two steps.

    Args:
        ends: when each step ended, in seconds.
        amounts: the samples of each step.
        is_steady: whether nothing but training came between the step before and this one.
    """
    kept, _ = steady_steps(ends, is_steady)
    seconds = sum(kept.values())
    return sum(amounts[at] for at in kept) / seconds if seconds > 0 else None


def steady_steps(ends: Sequence[float], is_steady: Sequence[bool]) -> tuple[dict[int, float], dict[int, float]]:
    """Return the seconds of each steady step, by its index, and of each that took too long to count as one."""
    first = min(max(FIRST_STEPS, len(ends) // FIRST_PART), len(ends) - 1)
    known = range(1, len(ends))
    choices = (
        [at for at in known if at >= first and is_steady[at]],
        [at for at in known if is_steady[at]],
        list(known),
    )
    chosen = next((each for each in choices if each), [])
    if not chosen:
        return {}, {}
    took = {at: ends[at] - ends[at - 1] for at in chosen}
    most = OUTLIER * sorted(took.values())[len(took) // 2]
    kept = {at: each for at, each in took.items() if each <= most}
    return kept, {at: each for at, each in took.items() if each > most}
