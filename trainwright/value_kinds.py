"""Which values are of kinds that take long to import, and are not imported here: until they are, no value can be one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

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
    """Return whether a value is a DTensor, of which each rank holds a part."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)
