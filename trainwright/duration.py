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
    """Return a duration in seconds; `name` is the setting's, for the error."""
    accepted = "expected 'DD:HH:MM:SS' (days, hours, minutes, seconds), a timedelta, or a dict of its arguments"
    example = f"Give for example {name}='00:12:00:00', timedelta(hours=12) or {{'hours': 12}}."
    given = f"{name}={value!r}"
    try:
        if isinstance(value, str):
            length = _read_clock(value)
        elif isinstance(value, timedelta):
            length = value
        elif isinstance(value, dict):
            length = _from_units(value)
        else:
            raise TypeError(f"{given} is {a_type_of(value)}; {accepted}. {example}")
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{given} {error}; {accepted}. {example}") from None
    seconds = length.total_seconds()
    if seconds < 0 or (seconds == 0 and not allows_zero):
        raise ValueError(f"{given} is not positive; {accepted}. {example}")
    return seconds


def seconds_of(timeout: float | timedelta | None) -> float | None:
    """Return a timeout in seconds, or raise ValueError or TypeError."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"timeout={timeout!r} is not accepted; pass seconds, a timedelta, or None.")
    if not 0 < seconds < float("inf"):
        raise ValueError(f"timeout={timeout!r} is not accepted; pass a positive number of seconds, or None.")
    return float(seconds)


def _read_clock(text: str) -> timedelta:
    found = _CLOCK.fullmatch(text.strip())
    if found is None:
        raise ValueError("is malformed")
    days, hours, minutes, seconds = (int(number) for number in found.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def _from_units(units: dict[str, float]) -> timedelta:
    unknown = [unit for unit in units if unit not in UNITS]
    if unknown:
        raise ValueError(f"has the unknown unit {unknown[0]!r}; the units are {', '.join(UNITS)}")
    for unit, amount in units.items():
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not math.isfinite(amount):
            raise ValueError(f"has {amount!r} for {unit!r}, which is not a finite number")
    return timedelta(**units)
