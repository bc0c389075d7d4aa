"""Comparison of the results of two runs: plain data exactly, and numbers within a tolerance."""

from __future__ import annotations

from typing import Any


def first_difference(one: Any, other: Any, tolerance: float, where: str = "") -> str:
    """Return where two pieces of plain data first differ, and how; "" if they are equal.

    Numbers may differ by the tolerance, times their magnitude if that is above 1.
    """
    place = f"{where or 'it'}: "
    if isinstance(one, float) and isinstance(other, float):
        both_nan = one != one and other != other
        is_near = one == other or both_nan or abs(one - other) <= tolerance * max(1.0, abs(one))
        return "" if is_near else f"{place}{one!r} and {other!r}, {abs(one - other):.2e} apart"
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{place}of one alone {sorted(one.keys() - other.keys())}, of the other {sorted(other.keys() - one.keys())}"
        pairs: Any = ((f"{where}[{key!r}]", one[key], other[key]) for key in one)
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return f"{place}{len(one)} items and {len(other)}: {str(one)[:200]} and {str(other)[:200]}"
        pairs = ((f"{where}[{index}]", *pair) for index, pair in enumerate(zip(one, other, strict=True)))
    else:
        return "" if one == other else f"{place}{one!r} and {other!r}"
    return next((found for each in pairs if (found := first_difference(each[1], each[2], tolerance, each[0]))), "")
