"""Metric objects: what is done with the torchmetrics objects of a module: found, computed over all ranks, reset."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainwright.checkpoint.foreign_formats import is_plain
from trainwright.metric_kinds import is_collection, is_metric
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.logged_value import Key, Reduced

if TYPE_CHECKING:
    from torchmetrics import Metric


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


def compute_metrics(module: nn.Module, keys: Iterable[Key]) -> dict[Key, Reduced]:
    """Compute the Metric objects of some keys, each once. Collective: they gather their own state, in the keys' order.

    Raises:
        ValueError: one computes what is no number, vector of numbers or dict of numbers.
    """
    values: dict[str, Any] = {}
    numbers: dict[Key, Reduced] = {}
    for key in sorted(keys):
        if key.attribute not in values:
            metric = found_at(module, key.attribute)
            with warnings.catch_warnings():
                # A rank without a batch of its own computes too; that it had no update is no news to the user.
                warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
                values[key.attribute] = metric.compute()
        numbers[key] = _numbers(key, values[key.attribute])
    return numbers


def reset_metrics(module: nn.Module, keys: Iterable[Key]) -> None:
    """Reset the Metric objects of some keys, each with the collection that it is in: its members share their state.

    On every rank: one without a batch of its own would keep what it computed, and not take part the next time.
    """
    for attribute in sorted({key.attribute for key in keys if key.attribute}):
        *parents, name = attribute.split(".")
        parent: Any = reduce(getattr, parents, module)
        (parent if is_collection(parent) else getattr(parent, name)).reset()


def metrics_in_use(module: nn.Module) -> set[str]:
    """Return where the module holds Metric objects that were updated since their reset."""
    return {path for path, child in module.named_modules() if is_metric(child) and child._update_count > 0}


def states_of_metrics(module: nn.Module, paths: Iterable[str]) -> dict[str, Any]:
    """Return the states of Metric objects by their paths, as plain data and tensors; nothing is copied."""
    states: dict[str, Any] = {}
    for path in sorted(paths):
        metric: Any = module.get_submodule(path)
        values = {name: getattr(metric, name) for name in metric._defaults}
        values = {name: value if isinstance(value, Tensor) else list(value) for name, value in values.items()}
        if is_plain(values, largest_tensor=sys.maxsize):
            states[path] = {"updates": metric._update_count, "states": values}
        elif not metric.__dict__.get("_has_warned_of_its_state"):
            metric.__dict__["_has_warned_of_its_state"] = True
            rank_zero_warn(
                f"the state of the metric {path!r}, a {type(metric).__name__}, is no plain data, so checkpoints are without "
                "it: a run that goes on within an epoch begins it anew.",
                stacklevel=2,
            )
    return states


def restore_metrics(module: nn.Module, states: dict[str, Any]) -> None:
    """Give the module's Metric objects their states back, and reset those that had none.

    The members of a collection that share a state get one each; torchmetrics lets them share again at the next update.
    """
    for path, metric in module.named_modules():
        if not is_metric(metric):
            continue
        if path not in states:
            if metric._update_count > 0:
                metric.reset()
            continue
        metric.reset()
        host = torch.device("cpu") if metric.compute_on_cpu else metric.device
        for name, value in states[path]["states"].items():
            if name not in metric._defaults:
                continue
            if isinstance(value, Tensor):
                setattr(metric, name, value.to(metric.device))
            else:
                setattr(metric, name, [each.to(host) if isinstance(each, Tensor) else each for each in value])
        metric._update_count = states[path]["updates"]


def _numbers(key: Key, value: Any) -> Reduced:
    number = _number(value)
    if number is not None:
        return number
    parts: Mapping[Any, Any] = {}
    if isinstance(value, Tensor) and value.dim() == 1:
        parts = dict(enumerate(value.tolist()))
    elif isinstance(value, Mapping):
        parts = value
    numbers = {str(name): number for name, each in parts.items() if (number := _number(each)) is not None}
    if numbers and len(numbers) == len(parts):
        return numbers
    told = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(
        f"the metric logged as {key.base_name!r} computes {told}; accepted are one number, a vector of numbers (logged as "
        f"{key.base_name}_0, ...) and a dict of numbers (logged as {key.base_name}_key). Log the rest under names of its own."
    )


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number else None
