"""Tests for kinds of values, and copies of mappings.

Kinds that take long to import are not imported here: until they are, no value can be one.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torchmetrics import Metric, MetricCollection


def is_metric(value: object) -> TypeGuard[Metric]:
    """Return whether a value is a torchmetrics Metric."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def is_collection(value: object) -> TypeGuard[MetricCollection]:
    """Return whether a value is a torchmetrics MetricCollection."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.MetricCollection)


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor, which is divided over the ranks."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


def with_values(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping of the same kind with other values."""
    if type(mapping) is dict:
        return values
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(values)  # type: ignore[call-arg]
    clone = copy.copy(mapping)  # a defaultdict, for example, cannot be constructed from a mapping
    for key, value in values.items():
        clone[key] = value  # transformers' ModelOutput forbids update
    return clone


def computed_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors with a graph that a module tree keeps, which a deep copy refuses.

    Such are a weight that torch.nn.utils.weight_norm or spectral_norm has computed, or a hidden state.
    """
    for each in module.modules():
        for value in tree_leaves(dict(vars(each))):
            if isinstance(value, Tensor) and not value.is_leaf:
                yield value
