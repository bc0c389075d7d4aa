"""Memory that a loop gives back."""

from __future__ import annotations

import gc
from typing import Any

import torch


def release_memory(*objects: Any) -> Any:
    """Return None for each object given, to replace it by, after collecting garbage and emptying the device's cache.

    >>> model, optimizer = release_memory(model, optimizer)
    """
    count = len(objects)
    del objects
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return [None] * count
