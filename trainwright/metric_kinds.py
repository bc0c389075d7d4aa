"""Which values are torchmetrics objects. It is not imported here: until it is imported, no value can be one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


def is_metric(value: object) -> TypeGuard[Metric]:
    """Return whether a value is a torchmetrics Metric."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def is_collection(value: object) -> TypeGuard[MetricCollection]:
    """Return whether a value is a torchmetrics MetricCollection."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.MetricCollection)
