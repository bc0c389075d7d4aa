"""Fingerprints and digests, by which a resumed run recognizes a batch and the order of the items before it."""

from __future__ import annotations

import json
import math
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

MOST_LEAVES = 64
VALUES = 16
"""Values taken from a tensor."""


def fingerprint(batch: Any) -> list[Any]:
    """Return a batch's shapes, a few values, and digests of its texts; other objects count by their class's name."""
    return list(islice(_values(batch), MOST_LEAVES * VALUES))


def matches(one: list[Any], other: list[Any]) -> bool:
    """Return whether two fingerprints show the same batch; numbers may differ as they do between two machines."""
    return len(one) == len(other) and all(map(_is_close, one, other))


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):  # floats differ a little between machines
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _values(batch: Any) -> Iterator[Any]:
    if isinstance(batch, (bool, int, float, type(None))):
        yield batch
    elif isinstance(batch, (str, bytes)):
        # Not hash(), which returns a different number for the same text in every process.
        yield zlib.crc32(batch.encode() if isinstance(batch, str) else batch)
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield str(key)
            yield from _values(value)
    elif isinstance(batch, (list, tuple)):
        yield len(batch)
        yield from chain.from_iterable(map(_values, batch))
    elif isinstance(batch, Tensor) and batch.layout == torch.strided and batch.numel():
        yield from batch.shape
        flat = batch.detach().reshape(-1)
        indices = torch.linspace(0, len(flat) - 1, min(len(flat), VALUES), device=flat.device).long()
        indices = indices.clamp_(max=len(flat) - 1)  # above 2**24 elements float32 may round up to the length
        taken = flat[indices]
        yield from (torch.view_as_real(taken).reshape(-1) if taken.is_complex() else taken).tolist()
    elif "numpy" in sys.modules and isinstance(batch, sys.modules["numpy"].ndarray) and batch.dtype.kind in "biuf":
        yield from _values(torch.as_tensor(batch.copy()))
    else:
        yield type(batch).__name__


class OrderDigest:
    """A running checksum over an epoch's items, which shows whether a resumed pass draws the items that were consumed."""

    def __init__(self) -> None:
        self._passes: dict[int, array[int]] = {}
        """The digests after the items of a pass, four bytes per item. Passes with items that have no digest are missing."""
        self._start = (0, 0, 0)
        """The pass and the item where the epoch begins, and the digest there (0 if unknown)."""
        self._is_to_check = False

    def begin(self, passes: int, items: int, digest: int) -> None:
        """Begin an epoch, or its rest, at an item of a pass, with the digest of the items before it."""
        self._passes.clear()
        self._start, self._is_to_check = (passes, items, digest), bool(digest and items)

    def begin_pass(self, passes: int) -> None:
        self._passes[passes] = array("I")

    def add(self, passes: int, items: Sequence[Any]) -> bool:
        """Add a pass's next items, which are lists of indices; return True, once, if the items before the start differ."""
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
        """Return the digest after this many items of a pass, or 0 if it is unknown or there are no items."""
        if 0 < items <= len(digests := self._passes.get(passes, ())):
            return digests[items - 1]
        return self._start[2] if (passes, items) == self._start[:2] else 0


def _content(item: Any) -> bytes | None:
    """Return a list of indices as bytes, the same in every process, or None if it is not plain data."""
    if isinstance(item, Iterator):
        return None  # it can be read only once
    with suppress(TypeError, ValueError, OverflowError):
        return array("q", list(item)).tobytes()
    with suppress(TypeError, ValueError):
        return json.dumps(list(item)).encode()
    return None
