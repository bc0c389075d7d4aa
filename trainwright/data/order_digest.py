"""Order digest: a running checksum that shows whether a resumed pass draws the items that the saved one consumed."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any


class OrderDigest:
    """The digest after each item of an epoch's passes, and the one that a resumed epoch has to reach."""

    def __init__(self) -> None:
        self._passes: dict[int, array[int]] = {}
        """By pass, four bytes an item; a pass with items that have no digest is missing."""
        self._start = (0, 0, 0)
        """The pass and the item that the epoch begins at, and the digest there; 0 if unknown."""
        self._is_to_check = False

    def begin(self, passes: int, items: int, digest: int) -> None:
        """Begin an epoch, or the rest of one, at an item of a pass, with the digest of the items before it."""
        self._passes.clear()
        self._start, self._is_to_check = (passes, items, digest), bool(digest and items)

    def begin_pass(self, passes: int) -> None:
        self._passes[passes] = array("I")

    def add(self, passes: int, items: Sequence[Any]) -> bool:
        """Add the next items of a pass, lists of indices; return True once, if the items before the start differ."""
        digests = self._passes.get(passes)
        if digests is None:
            return False
        latest = digests[-1] if digests else 0
        for item in items:
            content = _content(item)
            if content is None:
                del self._passes[passes]
                return False
            digests.append(latest := zlib.crc32(content, latest))
        start_pass, start, wanted = self._start
        if not self._is_to_check or passes != start_pass or len(digests) < start:
            return False
        self._is_to_check = False
        return digests[start - 1] != wanted

    def at(self, passes: int, items: int) -> int:
        """Return the digest after this many items of a pass; 0 before the first one, and if it is unknown."""
        if 0 < items <= len(digests := self._passes.get(passes, ())):
            return digests[items - 1]
        return self._start[2] if (passes, items) == self._start[:2] else 0


def _content(item: Any) -> bytes | None:
    """Return the same bytes for a list of indices in every process; None for what is not plain data."""
    if isinstance(item, Iterator):
        return None  # it can be read only once
    with suppress(TypeError, ValueError, OverflowError):
        return array("q", list(item)).tobytes()
    with suppress(TypeError, ValueError):
        return json.dumps(list(item)).encode()
    return None
