"""Shrinking: the smallest configuration that still differs like the drawn one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from fuzz.kind import Config


def simpler(value: Any, simplest: list[Any]) -> Iterator[Any]:
    """Yield simpler values, the simplest first: those listed before this one, then smaller numbers or shorter lists."""
    listed = simplest[: simplest.index(value)] if value in simplest else simplest
    yield from listed
    if isinstance(value, int) and not isinstance(value, bool):
        least = next((each for each in simplest if isinstance(each, int) and not isinstance(each, bool)), 0)
        for less in dict.fromkeys((value // 2, value - 1)):
            if least < less < value and less not in listed:
                yield less
    elif isinstance(value, list):
        for index in range(len(value)):
            yield value[:index] + value[index + 1 :]


def shrink(
    config: Config, simplest: dict[str, list[Any]], still: Callable[[Config], bool], seconds: float
) -> tuple[Config, int]:
    """Return the smallest configuration found for which `still` holds, and how many were tried.

    First many keys at once get their simplest values, then fewer, then one. Then each key tries simpler values in turn, until
    none works or the time is up.
    """
    deadline, tried = time.monotonic() + seconds, 0
    keys = [key for key in config if key in simplest]

    def holds(candidate: Config) -> bool:
        nonlocal tried
        if candidate == config or time.monotonic() > deadline:
            return False
        tried += 1
        return still(candidate)

    chunk = len(keys)
    while chunk > 1:
        for first in range(0, len(keys), chunk):
            candidate = {**config, **{key: simplest[key][0] for key in keys[first : first + chunk] if simplest[key]}}
            if holds(candidate):
                config = candidate
        chunk = (chunk + 1) // 2
    changed = True
    while changed and time.monotonic() < deadline:
        changed = False
        for key in keys:
            for value in simpler(config[key], simplest[key]):
                candidate = {**config, key: value}
                if holds(candidate):
                    config, changed = candidate, True
                    break
    return config, tried
