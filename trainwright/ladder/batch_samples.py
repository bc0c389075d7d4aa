"""The samples of a batch, as its tensors show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def batch_samples(batch: Any) -> int | None:
    """Return the leading size of the first array in a batch; None if it has none, as an iterator of batches."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif isinstance(batch, (list, tuple)):
        parts = list(batch)
    else:
        count = getattr(batch, "num_graphs", None)  # a batch of PyTorch Geometric
        return count if isinstance(count, int) else None
    return next((found for each in parts if (found := batch_samples(each)) is not None), None)
