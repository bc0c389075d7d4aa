"""Hostile data: limits that keep the time and memory of a load in proportion to the bytes of a checkpoint."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

MOST_EQUAL_HASHES = 100
"""How many keys may have one hash. Each is compared with all others, so that 50,000 such integers took half a minute."""
LEAST_SHARED = 1_000_000  # items that any pickle may have by sharing


def check_hashes(keys: list[Any]) -> list[Any]:
    """Return the keys of a set or a dict, or raise ValueError if too many have the same hash."""
    if len(keys) > MOST_EQUAL_HASHES and max(Counter(map(hash, keys)).values()) > MOST_EQUAL_HASHES:
        raise ValueError(f"more than {MOST_EQUAL_HASHES} keys of a dict or a set have the same hash")
    return keys


def check_sharing(content: Any) -> None:
    """Reject a pickle whose lists contain each other many times: 2 KB of them have more items than any memory holds.

    Raises:
        ValueError: the items, each as often as it is reached, are many more than the stored ones.
    """
    counts: dict[int, int] = {}
    stored = 0

    def count(value: Any) -> int:
        nonlocal stored
        items = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
        if not isinstance(items, (list, tuple, set, frozenset)):
            return 1
        if id(value) not in counts:
            stored += len(items)
            counts[id(value)] = LEAST_SHARED << 32  # until it is known, for a list that contains itself
            counts[id(value)] = 1 + sum(map(count, items))
        return counts[id(value)]

    if count(content) > LEAST_SHARED + 100 * stored:
        raise ValueError("its lists contain each other many times")


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pause the garbage collector, which would look through millions of new lists again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
