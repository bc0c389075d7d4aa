"""Transfer: a batch, whatever its structure, onto a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with each tensor in it on the device; other leaves as they are.

    An object with a `to(device)` of its own is asked to move itself. Copies from pinned memory do not wait.
    """

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if callable(getattr(leaf, "to", None)) and not isinstance(leaf, type) else leaf

    return map_leaves(moved, batch)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a nested structure (mappings, lists, tuples, named tuples) with the function applied to each leaf."""
    if callable(getattr(value, "to", None)):
        return function(value)
    if isinstance(value, Mapping):
        mapped = {key: map_leaves(function, each) for key, each in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return mapped if type(value) is dict else type(value)(mapped)  # type: ignore[call-arg]
        clone = copy.copy(value)  # a defaultdict, say, cannot be made of a mapping alone
        clone.update(mapped)
        return clone
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, each) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_leaves(function, each) for each in value)
    return function(value)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a nested structure with the function applied to each tensor in it."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)
