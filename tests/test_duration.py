"""Lengths of time, as settings give them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from trainwright.duration import to_seconds


@pytest.mark.parametrize(("value", "seconds"), [
    ("00:00:00:01", 1),
    ("01:02:03:04", 93784),
    ("100:00:00:00", 8640000),
    ("00:00:90:00", 5400),
    (timedelta(minutes=1.5), 90),
    ({"hours": 1, "seconds": 0.5}, 3600.5),
    ({"weeks": 1, "days": -6}, 86400),
])  # fmt: skip
def test_all_three_forms_are_read(value: Any, seconds: float) -> None:
    assert to_seconds(value, name="max_time") == seconds


@pytest.mark.parametrize(("value", "text"), [
    ("1:00", "max_time='1:00' is not accepted"),
    ("00:12:00", "max_time='00:12:00' is not accepted"),
    ("0:12:00:00", "is not accepted"),
    ("-1:12:00:00", "is not accepted"),
    ("00:00:00:00", "is not positive"),
    (timedelta(seconds=-1), "is not positive"),
    ({}, "is not positive"),
    ({"hour": 1}, "is no duration: 'hour' is an invalid keyword"),
    ({"hours": "1"}, "is no duration: unsupported type for timedelta hours component"),
    ({"hours": float("nan")}, "max_time"),
    ("99999999999999:00:00:00", "max_time"),
])  # fmt: skip
def test_what_is_malformed_is_refused(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        to_seconds(value, name="max_time")
    assert "Give for example max_time='00:12:00:00'" in str(caught.value)


@pytest.mark.parametrize("value", [3600, 1.5, None, ("00", "12")])
def test_other_kinds_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"train_time_interval=.* is not accepted. Expected 'DD:HH:MM:SS'"):
        to_seconds(value, name="train_time_interval")
