"""Metrics: what self.log collects during one epoch of training or one evaluation.

A value stays on its device: a step value is read when something shows it, an epoch value is summed there in float64. At
an epoch's end the (sum, weight) pairs of every key go over the ranks in one all_gather (see reduction.py). Where log may
be called and what it does there by default stands in log_rules.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainwright.metric_kinds import is_collection, is_metric
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.log_rules import (
    LogSettings,
    check_batch_size,
    check_name,
    check_settings,
    choose_levels,
    reduction_named,
    rule_of,
)
from trainwright.trainer.logged_value import Key, Loader, LoggedValue, Reduced, read_all
from trainwright.trainer.metric_objects import (
    found_at,
    metrics_in_use,
    paths_of_metrics,
    reset_metrics,
    restore_metrics,
    states_of_metrics,
    step_value,
)

if TYPE_CHECKING:
    from torchmetrics import Metric


class MetricCollector:
    """What one stage logs between two of its epoch ends.

    Args:
        module: where torchmetrics objects are looked up.
        training: whether it is training that logs; of an evaluation only the epoch's values can be followed by callbacks.
        stage: "train", "validation" or "test".
        rank: this process's rank; values that are rank 0's alone are left out on the others.
        warned: what the user was warned of already, kept for a run.
    """

    def __init__(
        self, module: nn.Module, training: bool, stage: str = "train", rank: int = 0, warned: set[str] | None = None
    ) -> None:
        self.values: dict[tuple[str, str, Loader | None], LoggedValue] = {}
        """By hook, name and loader."""
        self.hook = ""
        """The step or hook that runs."""
        self.loader: Loader | None = None
        """The evaluation loader whose batches are worked on; None between them, and where a single one has no name."""
        self.batch: Any = None
        """The batch that is being worked on; None between batches."""
        self.silent = False
        """True while a batch is run whose results are thrown away."""
        self.is_uneven = False
        """True while a batch is run of a round in which the ranks may have unequally many samples."""
        self.training, self.stage = training, stage
        self.computed: dict[Key, Reduced] = {}
        """The values of the Metric objects of loaders that have ended; alike on all ranks."""
        self.reduced: dict[Key, Reduced] = {}
        """The epoch values that are known over all ranks."""
        self.warned: set[str] = set() if warned is None else warned
        self._module = module
        self._rank = rank
        self._paths: dict[int, str] | None = None
        self._batch_size = 1.0
        self._batch_size_of: Any = None

    # -- where the loop is -------------------------------------------------------------------------------------------

    def begin_loader(self, loader: Loader | None) -> None:
        """Begin an evaluation loader; None where a single one has no name."""
        self.loader = loader

    def begin_batch(self, batch: Any, step: str = "training_step", is_uneven: bool = False) -> None:
        """Begin a batch of this step; `is_uneven`: the ranks may have unequally many samples in it."""
        self.batch, self.hook, self.is_uneven = batch, step, is_uneven

    def take_batch(self, batch: Any) -> None:
        """Begin another batch of the same step, which takes its batches itself."""
        self.batch = batch

    def end_batches(self) -> None:
        """End the latest batch: none is worked on."""
        self.batch = None

    def begin_uneven_round(self, silent: bool) -> None:
        """Begin a round in which the ranks have unequally many samples; `silent`: this rank has none."""
        self.is_uneven, self.silent = True, silent

    def end_uneven_round(self) -> None:
        """End it."""
        self.is_uneven = self.silent = False

    def enter_hook(self, name: str) -> str:
        """Let a hook log under its name, and return the name of the step or hook around it, to be entered again."""
        outer, self.hook = self.hook, name
        return outer

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Drop what the block logs."""
        was_silent, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = was_silent

    # -- the values --------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool,
        logger: bool | None,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Any,
        enable_graph: bool,
        sync_dist: bool,
        sync_dist_group: Any,
        add_dataloader_idx: bool,
        batch_size: Any,
        metric_attribute: str | None,
        rank_zero_only: bool,
    ) -> None:
        """Take one value (the contract is Module.log's)."""
        if self.silent:
            return
        settings = (
            prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group, add_dataloader_idx,
            metric_attribute, rank_zero_only,
        )  # fmt: skip
        logged = self.values.get((self.hook, name, self.loader))
        if logged is None or logged.settings != settings:
            if isinstance(value, Mapping) or is_collection(value):
                self._log_each(name, value, settings, batch_size)
                return
            logged = self._first_time(name, value, LogSettings(*settings), logged)
        if logged.is_ignored:
            return
        kept: Tensor | float
        if type(value) is Tensor and value.is_cpu and not logged.enable_graph:
            if value.dim() and value.numel() != 1:
                raise _not_one_element(name, value)
            kept = value.item()  # on the host reading waits for nothing, and is the cheapest copy: 0.2 us beside 1.3 us
        elif type(value) is float:
            kept = value
        elif isinstance(value, Tensor):
            if value.dim() and value.numel() != 1:
                raise _not_one_element(name, value)
            if hasattr(value, "full_tensor"):
                raise TypeError(
                    f"log({name!r}) was given a value that was computed from sharded parameters themselves, of which each rank "
                    "holds a part; pass value.full_tensor(), computed on every rank."
                )
            value = value.reshape(()) if value.dim() else value
            kept = value.detach().clone()
        elif isinstance(value, Real):  # int, bool, numpy's numbers
            kept = float(value)
        elif is_metric(value):
            self._log_metric(logged, value)
            return
        else:
            raise TypeError(
                f"self.log({name!r}, ...) got a {type(value).__name__}; accepted are a number, a tensor of one element, a "
                "torchmetrics Metric, or a flat dict of these."
            )
        logged.last = value.clone() if logged.enable_graph and isinstance(value, Tensor) else kept
        if logged.on_epoch:
            weight = 1.0
            if logged.reduce_fx == "mean":
                if batch_size is None:
                    weight = self._found_batch_size(name)
                else:
                    weight = (
                        batch_size if type(batch_size) is int and batch_size > 0 else check_batch_size(name, batch_size)
                    )
            logged.add(kept, weight)

    def steps(self) -> list[LoggedValue]:
        """Return what is logged by step and has a value."""
        return [logged for logged in self.values.values() if logged.on_step and logged.last is not None]

    def keep_reduced(self, reduced: Mapping[Key, Reduced]) -> None:
        """Keep epoch values that are known over all ranks."""
        self.reduced.update(reduced)

    def clear(self) -> None:
        """Forget the values and reset the Metric objects that were logged."""
        reset_metrics(self._module, [*self.reduced, *(logged.key for logged in self.values.values())])
        self.values.clear()
        self.computed.clear()
        self.reduced.clear()
        self.batch = self._batch_size_of = self.loader = None

    def state_dict(self, only: Collection[str] | None = None) -> dict[str, Any]:
        """Return, as plain data and tensors, what training has logged in this epoch and the states of all Metric objects.

        Nothing changes by it: what waits to be summed up goes on waiting, so that the sums are those of a run without a save.
        NOTE: waits for the device.

        Args:
            only: where the Metric objects of this epoch stand; None for all that are in use.
        """
        logged_values, in_use = list(self.values.values()), metrics_in_use(self._module)
        each_numbers = [logged.numbers() for logged in logged_values]
        rest = iter(read_all([number for numbers in each_numbers for number in numbers]))
        return {
            "values": [
                logged.state_dict(list(islice(rest, len(numbers))))
                for logged, numbers in zip(logged_values, each_numbers, strict=True)
            ],
            "metrics": states_of_metrics(self._module, in_use if only is None else in_use & set(only)),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from what a checkpoint holds of this epoch, in place of what was logged since; `device` is this rank's."""
        self.values.clear()
        for each in state["values"]:
            if each["attribute"] and not is_metric(found_at(self._module, each["attribute"])):
                continue  # the module is without it now
            logged = LoggedValue.restored(each, device)
            logged.is_ignored = logged.rank_zero_only and self._rank != 0
            self.values[logged.hook, logged.name, None] = logged
        restore_metrics(self._module, state["metrics"])

    def _log_each(self, name: str, values: Any, settings: tuple[Any, ...], batch_size: Any) -> None:
        """Log each value of a flat dict under name/key."""
        check_name(name)
        options = LogSettings(*settings)
        for key, value in flat_items(values):
            if isinstance(value, Mapping):
                raise ValueError(
                    f"self.log({name!r}, ...) got a dict that holds a dict under {key!r}; accepted is a flat one. Log the "
                    f"inner one by itself, as {f'{name}/{key}'!r}."
                )
            self.log(f"{name}/{key}", value, *options[:9], batch_size, None, options.rank_zero_only)

    def _first_time(self, name: str, value: Any, settings: LogSettings, known: LoggedValue | None) -> LoggedValue:
        """Make the entry of a name that is new in this hook; refuse one that is logged in two ways (ValueError).

        The entry of a name that a checkpoint holds goes on with what is `known` of it.
        """
        check_name(name)
        rule_of(name, self.hook)
        if known is not None and not known.is_restored:
            pairs = zip(settings._fields, known.settings, settings, strict=True)
            told = ", ".join(f"{field}={old!r} and then {new!r}" for field, old, new in pairs if old != new)
            raise ValueError(
                f"self.log({name!r}, ...) was called in {self.hook} with {told}; use one setting for a name, or two names."
            )
        check_settings(name, settings, is_metric=is_metric(value))
        levels = choose_levels(name, self.hook, settings)
        reduce_fx = reduction_named(settings.reduce_fx)
        logged = LoggedValue(self.hook, name, self.loader, settings, levels, reduce_fx)
        if self.loader is not None and not settings.add_dataloader_idx:
            self._refuse_shared_name(logged)
        if isinstance(value, Tensor) and value.is_complex():
            raise TypeError(f"self.log({name!r}, ...) got a complex tensor; accepted are real ones. Log its .abs().")
        logged.is_ignored = logged.rank_zero_only and self._rank != 0
        if known is not None:
            logged.take_over(known)
        self.values[self.hook, name, self.loader] = logged
        return logged

    def _refuse_shared_name(self, logged: LoggedValue) -> None:
        for other in self.values.values():
            if other.base_name == logged.base_name and other.loader not in (None, logged.loader):
                raise ValueError(
                    f"self.log({logged.name!r}, add_dataloader_idx=False) is called with two loaders, whose values would be "
                    "mixed under one name; leave add_dataloader_idx at True, or give each loader a name of its own."
                )

    def _log_metric(self, logged: LoggedValue, metric: Metric) -> None:
        if logged.metric is None:
            logged.metric, logged.attribute = metric, self._attribute_of(logged, metric)
        elif logged.metric is not metric:
            raise ValueError(
                f"self.log({logged.name!r}, ...) got another Metric than before in {self.hook}; give each a name of its own."
            )
        if logged.on_step:
            logged.last = step_value(logged.name, metric)

    def _attribute_of(self, logged: LoggedValue, metric: Metric) -> str:
        """Return where the module holds a Metric; ValueError where it does not."""
        given = logged.settings.metric_attribute
        if given is not None:
            if found_at(self._module, given) is not metric:
                raise ValueError(
                    f"self.log({logged.name!r}, metric_attribute={given!r}) got a Metric that {type(self._module).__name__} "
                    "does not hold there; give the path of the attribute that holds it, or leave metric_attribute out."
                )
            return given
        if self._paths is None:
            self._paths = paths_of_metrics(self._module)
        attribute = self._paths.get(id(metric))
        if attribute is None:
            raise ValueError(
                f"self.log({logged.name!r}, ...) got a Metric that is no attribute of the module; assign it in __init__ "
                "(self.accuracy = ...), so that it moves to the device and is reset, or say with metric_attribute= where it is."
            )
        return attribute

    def _found_batch_size(self, name: str) -> float:
        if self.batch is None:
            return 1.0
        if self._batch_size_of is self.batch:
            return self._batch_size
        batch = self.batch
        sizes = sorted(set(_leading_sizes(batch)))
        if not sizes:
            self._warn_once(
                f"no tensor was found in this batch, a {type(batch).__name__}; the mean of {name!r} over the epoch weighs "
                "each batch alike. Pass batch_size= to self.log to say which is the batch size.",
            )
        if len(sizes) > 1:
            self._warn_once(
                f"the tensors of this batch have leading sizes {sizes}; the mean of {name!r} over the epoch is "
                f"weighted by {sizes[-1]}. Pass batch_size= to self.log to say which is the batch size.",
            )
        self._batch_size = float(sizes[-1]) if sizes else 1.0
        self._batch_size_of = batch
        return self._batch_size

    def warn_of_rows(self, rows: list[int]) -> None:
        """Say, once for a run, that a gather in an uneven round was filled up; `rows` are those of each rank."""
        if "rows" not in self.warned:
            self.warned.add("rows")
            rank_zero_warn(
                f"all_gather: in a last round the ranks have {', '.join(map(str, rows))} rows, since it has fewer samples than "
                "a full one; those with fewer repeat theirs to fill up. With drop_last=True a training has no such round.",
                stacklevel=6,
            )

    def _warn_once(self, text: str) -> None:
        if "batch size" not in self.warned:
            self.warned.add("batch size")
            warnings.warn(text, stacklevel=5)


def flat_items(values: Any) -> Iterable[tuple[str, Any]]:
    """Return the names and values of a dict, or the prefixed names and the metrics of a MetricCollection."""
    items: Iterable[tuple[str, Any]]
    items = values.items(keep_base=False, copy_state=False) if is_collection(values) else values.items()
    return list(items)


def _not_one_element(name: str, value: Tensor) -> ValueError:
    return ValueError(
        f"self.log({name!r}, ...) got a tensor of shape {tuple(value.shape)}; accepted is one element. Reduce it first, for "
        "example with .mean()."
    )


def _leading_sizes(batch: Any) -> list[int]:
    if isinstance(batch, Tensor):
        return [batch.shape[0]] if batch.dim() else []
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif is_dataclass(batch) and not isinstance(batch, type):
        batch = [getattr(batch, field.name) for field in fields(batch)]
    if isinstance(batch, (list, tuple)):
        return [size for item in batch for size in _leading_sizes(item)]
    return []
