"""Precisions by name: which numbers a step computes in, and how its loss is scaled."""

from __future__ import annotations

from trainwright.precision.base import Precision, StepResult

NAMES = {
    "32-true": ("32", "32-true"),
    "16-mixed": ("16", "16-mixed"),
    "bf16-mixed": ("bf16", "bf16-mixed"),
}


def resolve_precision(precision: str | int | Precision | None, device_type: str) -> Precision:
    """Return the precision that a name, a number of bits or an instance stands for.

    Raises:
        ValueError: the name is unknown.
        TypeError: neither a name, a number nor a Precision.
    """
    if isinstance(precision, Precision):
        return precision
    if precision is None:
        precision = "32-true"
    if isinstance(precision, bool) or not isinstance(precision, (str, int)):
        raise TypeError(
            f"precision={precision!r} is a {type(precision).__name__}; accepted are a name, 16, 32 or a Precision "
            f"instance. Choose from {', '.join(NAMES)}."
        )
    wanted = str(precision).lower()
    for name, spellings in NAMES.items():
        if wanted in spellings:
            if name == "32-true":
                return Precision()
            from trainwright.precision.mixed import MixedPrecision

            return MixedPrecision(name, device_type)
    raise ValueError(
        f"precision={precision!r} is unknown; choose from {', '.join(NAMES)} (16 and 32 may be numbers), "
        "or pass a Precision instance."
    )


__all__ = ["NAMES", "Precision", "StepResult", "resolve_precision"]
