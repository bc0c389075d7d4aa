"""Transfer: a batch, whatever its structure, onto a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with each tensor in it on the device; other leaves as they are.

    Mappings, lists, tuples and named tuples are rebuilt where something in them moved; an object with a `to(device)` of
    its own is asked to move itself. Copies from pinned memory do not wait.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device) for key, value in batch.items()}
        return type(batch)(moved) if type(batch) is not dict else moved  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    if not isinstance(batch, type) and callable(getattr(batch, "to", None)):
        return batch.to(device)
    return batch
