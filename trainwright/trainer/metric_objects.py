"""Metric objects: finds the torchmetrics objects of a module, computes them over all ranks, saves and resets them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainwright.checkpoint.foreign_formats import is_plain
from trainwright.errors import a_type_of
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.logged_value import Key, Reduced
from trainwright.value_kinds import is_collection, is_metric

if TYPE_CHECKING:
    from torchmetrics import Metric


COMBINATIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "dim_zero_sum": lambda values: torch.stack(values).sum(0),
    "dim_zero_max": lambda values: torch.stack(values).amax(0),
    "dim_zero_min": lambda values: torch.stack(values).amin(0),
    "dim_zero_cat": torch.cat,
}
"""How to merge a Metric's states of several ranks, by the name of torchmetrics' reduction for them."""


def found_at(module: nn.Module, path: str) -> Any:
    """Return the attribute at a dotted path, else None."""
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError:
        return None


def step_value(name: str, metric: Metric) -> Tensor | None:
    """Return the result of a Metric's latest forward; None if it was only updated."""
    # Not compute(), which would gather over the ranks and return the value of all batches so far.
    value: Any = metric._forward_cache
    if value is None:
        return None
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    raise ValueError(
        f"self.log({name!r}, on_step=True) got a Metric whose value is not a single number. Log each of its parts under its "
        "own name."
    )


def compute_metrics(module: nn.Module, keys: Iterable[Key]) -> dict[Key, Reduced]:
    """Compute the Metric objects of some keys, each once. Collective: they gather their states, in the keys' order.

    Raises:
        ValueError: one computes something other than a number, a vector of numbers or a dict of numbers.
    """
    values: dict[str, Any] = {}
    numbers: dict[Key, Reduced] = {}
    for key in sorted(keys):  # the same order on each rank, since each `compute` gathers
        if key.attribute not in values:
            metric = found_at(module, key.attribute)
            with warnings.catch_warnings():
                # A rank that had no batch computes too, and torchmetrics warns that its metric was not updated.
                warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
                values[key.attribute] = metric.compute()
        numbers[key] = _numbers(key, values[key.attribute])
    return numbers


def reset_metrics(module: nn.Module, keys: Iterable[Key]) -> None:
    """Reset the Metric objects of some keys on every rank, each with its collection, whose members share their state.

    A rank that had no batch would otherwise return its cached result the next time, without joining the gather.
    """
    for attribute in sorted({key.attribute for key in keys if key.attribute}):
        *parents, name = attribute.split(".")
        parent: Any = reduce(getattr, parents, module)
        (parent if is_collection(parent) else getattr(parent, name)).reset()


def metrics_in_use(module: nn.Module) -> dict[str, int]:
    """Return how often each of the module's Metric objects was updated since its reset, by path, without zeros."""
    metrics = {path: child for path, child in module.named_modules() if is_metric(child)}
    return {path: int(child._update_count) for path, child in metrics.items() if child._update_count > 0}


def refuse_shared(logged: Iterable[str], before: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Raise ValueError if another stage has updated one of these Metric objects; `before` and `now` count the updates."""
    for path in logged:
        if now.get(path, 0) > before.get(path, 0):
            name = path.rpartition(".")[2]
            raise ValueError(
                f"the Metric {path!r} is updated in training and in validation, so the value that self.log computes from it "
                f"would mix their samples. Create one for each, such as self.train_{name} and self.val_{name}; where they are "
                "to be mixed, log the value of its compute()."
            )


def states_of_metrics(module: nn.Module, paths: Iterable[str]) -> dict[str, Any]:
    """Return the states of Metric objects by path, as plain data and tensors, not copied."""
    states: dict[str, Any] = {}
    for path in sorted(paths):
        metric: Any = module.get_submodule(path)
        values = {name: getattr(metric, name) for name in metric._defaults}
        values = {name: value if isinstance(value, Tensor) else list(value) for name, value in values.items()}
        # Of any size: some metrics keep every prediction of the epoch.
        if is_plain(values, largest_tensor=sys.maxsize):
            states[path] = {"updates": metric._update_count, "states": values}
        elif not metric.__dict__.get("_has_warned_of_its_state"):
            metric.__dict__["_has_warned_of_its_state"] = True
            rank_zero_warn(
                f"the state of the metric {path!r}, {a_type_of(metric)}, is not plain data, so checkpoints leave it "
                "out: a run that resumes within an epoch resets it.",
                stacklevel=2,
            )
    return states


def restore_metrics(module: nn.Module, states: dict[str, Any]) -> None:
    """Restore the states of the module's Metric objects, and reset those that have none here.

    The members of a collection that shared a state get one each, and share again after their next update.
    """
    for path, metric in module.named_modules():
        if not is_metric(metric):
            continue
        if path in states or metric._update_count > 0:
            metric.reset()
        if path not in states:
            continue
        # With compute_on_cpu torchmetrics moves lists of states to the host at each update.
        list_device = torch.device("cpu") if metric.compute_on_cpu else metric.device
        for name, value in states[path]["states"].items():
            if name in metric._defaults and isinstance(value, Tensor):
                setattr(metric, name, value.to(metric.device))
            elif name in metric._defaults:
                setattr(metric, name, [each.to(list_device) if isinstance(each, Tensor) else each for each in value])
        metric._update_count = states[path]["updates"]


def merge_states(metric: Any, states: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Merge a Metric's states of several ranks; None if one of its reductions is unknown."""
    together: dict[str, Any] = {}
    for name in states[0]["states"]:
        parts = [state["states"][name] for state in states]
        combine = COMBINATIONS.get(getattr(getattr(metric, "_reductions", {}).get(name), "__name__", ""))
        if isinstance(parts[0], list):
            together[name] = [item for part in parts for item in part]
        elif combine is not None:
            together[name] = combine(parts)
        else:
            return None
    return {"updates": sum(state["updates"] for state in states), "states": together}


def _numbers(key: Key, value: Any) -> Reduced:
    if (whole := _number(value)) is not None:
        return whole
    parts: Mapping[Any, Any] = {}
    if isinstance(value, Tensor) and value.dim() == 1:
        parts = dict(enumerate(value.tolist()))
    elif isinstance(value, Mapping):
        parts = value
    numbers = {str(name): number for name, each in parts.items() if (number := _number(each)) is not None}
    if numbers and len(numbers) == len(parts):
        return numbers
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else a_type_of(value)
    raise ValueError(
        f"the metric logged as {key.base_name!r} computes {kind}. Expected one number, a vector of numbers (logged as "
        f"{key.base_name}_0, ...) and a dict of numbers (logged as {key.base_name}_key). Log the rest under other names."
    )


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number else None
