"""Metric objects: finds the torchmetrics objects of a module, computes them over all ranks, saves and resets them.

The private names of torchmetrics' Metric were read in torchmetrics 1.4 to 1.9.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.checkpoint.foreign_formats import is_plain
from trainwright.data.transfer import to_device
from trainwright.distributed import collectives
from trainwright.errors import a_type_of
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.logged_value import Key
from trainwright.value_kinds import is_collection, is_metric

if TYPE_CHECKING:
    from torchmetrics import Metric

Undo = Callable[[], None]


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
    return None if value is None else _single(name, value).detach().reshape(())


def compute_metrics(module: nn.Module, keys: Iterable[Key]) -> dict[Key, float]:
    """Compute the Metric objects of some keys, each once. Collective: they gather their states, in the keys' order.

    Raises:
        ValueError: one computes something other than a number.
    """
    values: dict[str, Any] = {}
    numbers: dict[Key, float] = {}
    for key in sorted(keys):  # the same order on each rank, since each `compute` gathers
        if key.attribute not in values:
            with warnings.catch_warnings():
                # A rank that had no batch computes too, and torchmetrics warns that its metric was not updated.
                warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
                values[key.attribute] = found_at(module, key.attribute).compute()
        numbers[key] = float(_single(key.base_name, values[key.attribute]))
    return numbers


def reset_metrics(module: nn.Module, keys: Iterable[Key]) -> None:
    """Reset the Metric objects of some keys on every rank, each with its collection, whose members share their state.

    A rank that had no batch would otherwise return its cached result the next time, without joining the gather.
    """
    for attribute in sorted({key.attribute for key in keys if key.attribute}):
        *parents, name = attribute.split(".")
        parent: Any = reduce(getattr, parents, module)
        (parent if is_collection(parent) else getattr(parent, name)).reset()


def states_of_metrics(module: nn.Module, paths: Iterable[str]) -> dict[str, Any]:
    """Return the states of Metric objects by path, as plain data and tensors, not copied."""
    states: dict[str, Any] = {}
    for path in sorted(paths):
        metric: Any = module.get_submodule(path)
        values = {name: value if isinstance(value, Tensor) else [*value] for name, value in metric.metric_state.items()}
        # Of any size: some metrics keep every prediction of the epoch.
        if is_plain(values, largest_tensor=sys.maxsize):
            states[path] = {"updates": metric.update_count, "states": values}
        else:
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
        if path in states or metric.update_count:
            metric.reset()
        if path not in states:
            continue
        # With compute_on_cpu torchmetrics moves lists of states to the host at each update.
        list_device = torch.device("cpu") if metric.compute_on_cpu else metric.device
        for name in metric.metric_state.keys() & states[path]["states"].keys():
            value = states[path]["states"][name]
            setattr(metric, name, to_device(value, list_device if isinstance(value, list) else metric.device))
        metric._update_count = states[path]["updates"]


def gather_by_data(module: nn.Module) -> Undo:
    """Make the Metric objects gather over the data ranks; return a function that ends that."""
    metrics = [child for child in module.modules() if is_metric(child) and child.dist_sync_fn is None]

    def gather_by(function: Callable[..., list[Tensor]] | None) -> None:
        for metric in metrics:
            metric.dist_sync_fn = function

    gather_by(_gather_over_data_ranks)
    return partial(gather_by, None)


def _gather_over_data_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    # Not the attribute process_group of a Metric, because a group cannot be copied with the module.
    from torchmetrics.utilities.distributed import gather_all_tensors

    return gather_all_tensors(tensor, group or collectives.data_group())


def restore_of(metric: Metric) -> Undo:
    """Return a function that restores the present state of a Metric."""
    stored = metric.metric_state.items()
    states = {name: value.detach().clone() if isinstance(value, Tensor) else [*value] for name, value in stored}
    updates = metric.update_count

    def restore() -> None:
        for name, value in states.items():
            setattr(metric, name, value)
        metric._update_count, metric._computed = updates, None

    return restore


def take_nothing_in(metric: Metric) -> Undo:
    """Let a Metric object that gathers at every step take part without a sample; return a function that ends that.

    It keeps the samples that it gathers from the other ranks, as the Metric objects there do.
    """
    update = metric.__dict__["update"]

    def take_nothing(*args: Any, **kwargs: Any) -> None:
        metric._computed = None  # otherwise compute() would return its cached value and not gather
        metric._update_count += 1

    metric.__dict__["update"] = take_nothing
    return partial(metric.__dict__.__setitem__, "update", update)


def _single(name: str, value: Any) -> Tensor:
    """Return the value of a Metric as a tensor; ValueError unless it is a single number."""
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
        return torch.as_tensor(value)
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else a_type_of(value)
    raise ValueError(
        f"the metric logged as {name!r} computes {kind}. Expected one number. In the hook of the epoch's end log the parts "
        "of its compute() with self.log_dict, and call its reset()."
    )
