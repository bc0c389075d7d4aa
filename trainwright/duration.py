"""Durations in settings."""

from __future__ import annotations

import math
import re
from datetime import timedelta

_CLOCK = re.compile(r"(\d{2,}):(\d{2,}):(\d{2,}):(\d{2,})", re.ASCII)


def to_seconds(
    value: str | timedelta | dict[str, float], *, name: str = "duration", allows_zero: bool = False
) -> float:
    """Return a duration in seconds. Errors call the setting `name`."""
    expected = (
        "Expected 'DD:HH:MM:SS' (days, hours, minutes, seconds), a timedelta, or a dict of its arguments. Give for example "
        f"{name}='00:12:00:00', timedelta(hours=12) or {{'hours': 12}}."
    )
    match = _CLOCK.fullmatch(value) if isinstance(value, str) else None
    units = (
        dict(zip(("days", "hours", "minutes", "seconds"), map(int, match.groups()), strict=True)) if match else value
    )
    try:
        length = timedelta(**units) if isinstance(units, dict) else units
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}={value!r} is no duration: {error}. {expected}") from None
    if not isinstance(length, timedelta):
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name}={value!r} is not accepted. {expected}")
    seconds = length.total_seconds()
    if seconds < 0 or (seconds == 0 and not allows_zero):
        raise ValueError(f"{name}={value!r} is not positive. {expected}")
    return seconds


def seconds_of(timeout: float | timedelta | None, name: str = "timeout") -> float | None:
    """Return a timeout in seconds. Errors (ValueError, TypeError) call the setting `name`."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, (int, float))):
        raise TypeError(f"{name}={timeout!r} is not accepted. Pass seconds, a timedelta, or None.")
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"{name}={timeout!r} is not above 0 and finite. Pass seconds, such as 900, or a timedelta.")
    return seconds
