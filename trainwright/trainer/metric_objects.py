"""Metric objects: what is done with the torchmetrics objects of a module: found, computed over all ranks, reset."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainwright.module import is_metric
from trainwright.trainer.logged_value import Key

if TYPE_CHECKING:
    from torchmetrics import Metric


def is_collection(value: object) -> bool:
    """Return whether a value is a torchmetrics MetricCollection."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.MetricCollection)


def paths_of_metrics(module: nn.Module) -> dict[int, str]:
    """Return where the module holds its Metric objects, by id."""
    return {id(child): path for path, child in module.named_modules() if is_metric(child)}


def found_at(module: nn.Module, path: str) -> Any:
    """Return what an attribute's path leads to; None where it leads nowhere."""
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError:
        return None


def step_value(name: str, metric: Metric) -> Tensor | None:
    """Return what a Metric's latest forward gave; None where it was only updated."""
    value: Any = metric._forward_cache
    if value is None:
        return None
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    raise ValueError(
        f"self.log({name!r}, on_step=True) got a Metric whose value is no single number; log its parts under names of their "
        "own."
    )


def compute_metrics(module: nn.Module, keys: Iterable[Key]) -> dict[Key, float]:
    """Compute the Metric objects of some keys, each once. Collective: they gather their own state, in the keys' order."""
    values: dict[str, Any] = {}
    numbers: dict[Key, float] = {}
    for key in sorted(keys):
        if key.attribute not in values:
            metric = found_at(module, key.attribute)
            with warnings.catch_warnings():
                # A rank without a batch of its own computes too; that it had no update is no news to the user.
                warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
                values[key.attribute] = metric.compute()
        numbers[key] = _number(key, values[key.attribute])
    return numbers


def reset_metrics(module: nn.Module, keys: Iterable[Key]) -> None:
    """Reset the Metric objects of some keys, each with the collection that it is in: its members share their state.

    On every rank: one without a batch of its own would keep what it computed, and not take part the next time.
    """
    for attribute in sorted({key.attribute for key in keys if key.attribute}):
        *parents, name = attribute.split(".")
        parent: Any = reduce(getattr, parents, module)
        (parent if is_collection(parent) else getattr(parent, name)).reset()


def _number(key: Key, value: Any) -> float:
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    told = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(
        f"the metric logged as {key.base_name!r} computes {told}; accepted is one element. Log its elements under names of "
        "their own."
    )
