"""Fingerprints, by which a resumed run recognizes a batch, and ranks compare their first batches."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterator, Mapping
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
