"""Durations in settings."""

from __future__ import annotations

import math
import re
from datetime import timedelta

from trainwright.errors import a_type_of

UNITS = ("weeks", "days", "hours", "minutes", "seconds", "milliseconds", "microseconds")
_CLOCK = re.compile(r"(\d{2,}):(\d{2,}):(\d{2,}):(\d{2,})", re.ASCII)


def to_seconds(
    value: str | timedelta | dict[str, float], *, name: str = "duration", allows_zero: bool = False
) -> float:
    """Return a duration in seconds. Errors call the setting `name`."""
    expected = (
        "Expected 'DD:HH:MM:SS' (days, hours, minutes, seconds), a timedelta, or a dict of its arguments. Give for example "
        f"{name}='00:12:00:00', timedelta(hours=12) or {{'hours': 12}}."
    )
    if not isinstance(value, (str, timedelta, dict)):
        raise TypeError(f"{name}={value!r} is {a_type_of(value)}. {expected}")
    try:
        length = value if isinstance(value, timedelta) else timedelta(**_units_of(value))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name}={value!r} {error}. {expected}") from None
    seconds = length.total_seconds()
    if seconds < 0 or (seconds == 0 and not allows_zero):
        raise ValueError(f"{name}={value!r} is not positive. {expected}")
    return seconds


def seconds_of(timeout: float | timedelta | None) -> float | None:
    """Return a timeout in seconds, or raise ValueError or TypeError."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"timeout={timeout!r} is not accepted. Pass seconds, a timedelta, or None.")
    if not 0 < seconds < math.inf:
        raise ValueError(f"timeout={timeout!r} is not accepted. Pass a positive number of seconds, or None.")
    return float(seconds)


def _units_of(value: str | dict[str, float]) -> dict[str, float]:
    if isinstance(value, str):
        match = _CLOCK.fullmatch(value.strip())
        if match is None:
            raise ValueError("is malformed")
        return dict(zip(UNITS[1:5], map(int, match.groups()), strict=True))
    for unit, amount in value.items():
        if unit not in UNITS or not isinstance(amount, (int, float)):
            raise ValueError(f"has {amount!r} for the unit {unit!r}; the units are {', '.join(UNITS)}")
    return value
