"""Metrics: the values that self.log collects during one epoch of training or one evaluation.

A value stays on its device: a step value is read only to be shown, an epoch value is summed there in float64. At an epoch's
end one all_gather reduces the (sum, weight) pairs of every key (reduction.py). log_rules.py says which hooks may log.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from numbers import Real
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainwright.data.batch_stream import sample_counts
from trainwright.errors import a_type_of
from trainwright.rank_zero import rank_zero_warn, warn
from trainwright.trainer.log_rules import (
    LogSettings,
    check_batch_size,
    check_name,
    check_settings,
    choose_levels,
    reduction_named,
)
from trainwright.trainer.logged_value import Key, Loader, LoggedValue, Reduced, read_all
from trainwright.trainer.metric_objects import (
    found_at,
    merge_states,
    metrics_in_use,
    refuse_shared,
    reset_metrics,
    restore_metrics,
    states_of_metrics,
    step_value,
)
from trainwright.value_kinds import is_collection, is_metric

if TYPE_CHECKING:
    from torchmetrics import Metric


class MetricCollector:
    """The values that one stage logs between two of its epoch ends.

    Args:
        module: holds the torchmetrics objects.
        stage: "train", "validation" or "test".
        rank: the rank of this process. Ranks other than 0 ignore values that only rank 0 logs.
        warned: the subjects of this run's warnings so far.
        others: paths of Metric objects that another stage logs.
    """

    def __init__(
        self, module: nn.Module, stage: str = "train", rank: int = 0, warned: set[str] | None = None, others: Any = ()
    ) -> None:
        self.values: dict[tuple[str, str, Loader | None], LoggedValue] = {}
        """The logged values, by hook, name and loader."""
        self.hook = ""
        """The running step or hook."""
        self.loader: Loader | None = None
        """The current evaluation loader. None between loaders, and for a single loader without a name."""
        self.batch: Any = None
        """The current batch. None between batches."""
        self.index = 0
        """The number of the current batch."""
        self.silent = False
        """True during a batch whose results are discarded."""
        self.is_uneven = False
        """True during a batch of a round in which ranks may have different numbers of samples."""
        self.stage = stage
        self.computed: dict[Key, Reduced] = {}
        """The values of the Metric objects of loaders that have ended, the same on all ranks."""
        self.reduced: dict[Key, Reduced] = {}
        """The epoch values that were reduced over all ranks."""
        self.warned: set[str] = {"logger"} if warned is None else warned
        self.doubles: set[str] = set()
        """The names that were logged as float64 tensors."""
        self._module, self._rank, self._others = module, rank, others
        self._paths: dict[int, str] | None = None  # by the Metric's id; made when a Metric is first logged
        self._batch_size = 1.0
        self._batch_size_of: Any = None  # the batch itself: an id may be used again

    def begin_loader(self, loader: Loader | None) -> None:
        """Begin an evaluation loader. None ends the latest one."""
        self.loader = loader
        self.batch = None

    def begin_batch(self, batch: Any, step: str = "training_step", is_uneven: bool = False, *, index: int) -> None:
        """Begin a batch of a step, whose hook may log from here on."""
        self.batch, self.index = batch, index
        self.hook, self.is_uneven = step, is_uneven

    def take_batch(self, batch: Any, index: int) -> None:
        """Begin another batch within a step that pulls its batches."""
        self.batch = batch
        self.index = index

    def end_batches(self) -> None:
        self.batch = None

    def annotate(self, error: BaseException) -> None:
        """Add a batch's number and contents to an error of its step or of a hook with it."""
        kinds = (RuntimeError, ValueError, TypeError, LookupError)
        frames = [frame for frame, _ in walk_tb(error.__traceback__) if isinstance(error, kinds)]
        if self.batch is None or all(frame.f_code.co_name != self.hook for frame in frames):
            return
        error.add_note(f"In {self.hook}, with batch {self.index}: {_in_words(self.batch)}.")

    def begin_uneven_round(self, silent: bool) -> None:
        """Begin a round in which ranks have different numbers of samples. With `silent` this rank has none."""
        self.is_uneven = True
        self.silent = silent

    def end_uneven_round(self) -> None:
        """End the round."""
        self.is_uneven = False
        self.silent = False

    def enter_hook(self, name: str) -> str:
        """Let a hook log under its name, and return the hook around it, to enter again afterwards."""
        outer, self.hook = self.hook, name
        return outer

    @contextmanager
    def silenced(self) -> Iterator[None]:
        was_silent, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = was_silent

    def log(self, name: str, value: Any, settings: tuple[Any, ...], batch_size: Any = None) -> None:
        """Record one value with these `LogSettings`, as a plain tuple; Module.log says what they mean."""
        if self.silent:
            return
        logged = self.values.get((self.hook, name, self.loader))
        if logged is None or logged.settings != settings:  # the checks cost time, so they are made once for a name
            if isinstance(value, Mapping) or is_collection(value):
                self._log_each(name, value, settings, batch_size)
                return
            logged = self._first_time(name, value, LogSettings(*settings), logged)
        if logged.is_ignored:
            return
        number: Tensor | float
        if type(value) is float:  # the exact types first: this runs at every batch
            number = value
        elif isinstance(value, Tensor):
            if value.dim() and value.numel() != 1:
                raise ValueError(
                    f"self.log({name!r}, ...) got a tensor of shape {tuple(value.shape)}. Expected one element. Reduce it "
                    "first, for example with .mean()."
                )
            if type(value) is Tensor and value.is_cpu and not logged.enable_graph:
                number = value.item()  # host memory is read without waiting, in 0.2 us; a copy takes 1.3 us
            else:
                if hasattr(value, "full_tensor"):
                    raise TypeError(
                        f"log({name!r}) was given a value that was computed from sharded parameters themselves, of which "
                        "every rank has a part. Pass value.full_tensor(), computed on every rank."
                    )
                value = value.reshape(()) if value.dim() else value  # otherwise (1,) and () could not be stacked
                number = value.detach().clone()  # the user may change the tensor in place before it is read
        elif isinstance(value, Real):  # int, bool, numpy's numbers
            number = float(value)
        elif is_metric(value):
            self._log_metric(logged, value)
            return
        else:
            raise TypeError(
                f"self.log({name!r}, ...) got {a_type_of(value)}. Expected a number, a tensor of one element, a "
                "torchmetrics Metric, or a flat dict of these."
            )
        logged.show(value.clone() if logged.enable_graph and isinstance(value, Tensor) else number)
        if logged.on_epoch:
            weight = 1.0
            if logged.reduce_fx == "mean":
                if batch_size is None:
                    weight = self._found_batch_size(name)
                else:
                    weight = (
                        batch_size if type(batch_size) is int and batch_size > 0 else check_batch_size(name, batch_size)
                    )
            logged.add(number, weight)

    def steps(self) -> list[LoggedValue]:
        return [logged for logged in self.values.values() if logged.on_step and logged.last is not None]

    def metrics(self) -> set[str]:
        """Return the paths of the Metric objects that were logged."""
        return {path for logged in self.values.values() if (path := logged.key.attribute)}

    def clear(self) -> None:
        """Drop the values, and reset the logged Metric objects."""
        # Also objects logged on other ranks, which `reduced` names: every rank has computed them.
        reset_metrics(self._module, [*self.reduced, *(logged.key for logged in self.values.values())])
        self.values.clear()
        self.computed.clear()
        self.reduced.clear()
        self.batch = self._batch_size_of = self.loader = None

    def state_dict(self, only: Collection[str] | None = None) -> dict[str, Any]:
        """Return, as plain data and tensors, the values of this epoch and the states of the Metric objects in use.

        `only` restricts the Metric objects to these paths. NOTE: waits for the device.
        """
        logged_values, in_use = list(self.values.values()), metrics_in_use(self._module)
        numbers_of = [logged.numbers() for logged in logged_values]
        rest = iter(read_all([number for numbers in numbers_of for number in numbers]))  # one transfer for all
        return {
            "values": [
                logged.state_dict(list(islice(rest, len(numbers))))
                for logged, numbers in zip(logged_values, numbers_of, strict=True)
            ],
            "metrics": states_of_metrics(self._module, in_use if only is None else in_use.keys() & set(only)),
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Replace this epoch's logged values by a checkpoint's. `device` is the device of this rank."""
        self.values.clear()
        for each in state["values"]:
            if each["attribute"] and not is_metric(found_at(self._module, each["attribute"])):
                continue  # the module no longer has it
            logged = LoggedValue.restored(each, device, self._rank)
            self.values[logged.hook, logged.name, None] = logged
        restore_metrics(self._module, state["metrics"])

    def _log_each(self, name: str, values: Any, settings: tuple[Any, ...], batch_size: Any) -> None:
        """Log the values of a flat dict under name/key."""
        check_name(name)
        options = LogSettings(*settings)._replace(metric_attribute=None)
        for key, value in flat_items(values):
            if isinstance(value, Mapping):
                raise ValueError(
                    f"self.log({name!r}, ...) got a dict that holds a dict under {key!r}. Expected a flat dict. Log the "
                    f"inner one by itself, as {f'{name}/{key}'!r}."
                )
            self.log(f"{name}/{key}", value, options, batch_size)

    def _first_time(self, name: str, value: Any, settings: LogSettings, known: LoggedValue | None) -> LoggedValue:
        """Add the entry of a name that is new in this hook, or continue from the checkpoint's entry (`known`).

        Raises:
            ValueError: the name is logged with other settings than before.
        """
        check_name(name)
        if known is not None and not known.is_restored:
            pairs = zip(settings._fields, known.settings, settings, strict=True)
            changes = ", ".join(f"{field}={old!r} and then {new!r}" for field, old, new in pairs if old != new)
            raise ValueError(
                f"self.log({name!r}, ...) was called in {self.hook} with {changes}. Use one setting for a name, or two names."
            )
        levels = choose_levels(name, self.hook, settings)
        check_settings(name, settings, is_metric=is_metric(value))
        reduce_fx = reduction_named(settings.reduce_fx)
        logged = LoggedValue(self.hook, name, self.loader, settings, levels, reduce_fx, self._rank)
        if self.loader is not None and not settings.add_dataloader_idx:
            others = [each.loader for each in self.values.values() if each.base_name == logged.base_name]
            if set(others) - {None, self.loader}:
                raise ValueError(
                    f"self.log({name!r}, add_dataloader_idx=False) is called with two loaders, whose values would be mixed "
                    "under one name. Leave add_dataloader_idx at True, or use a different name for each loader."
                )
        if isinstance(value, Tensor) and value.is_complex():
            raise TypeError(f"self.log({name!r}, ...) got a complex tensor. Expected a real one. Log its .abs().")
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            self.doubles |= {logged.base_name, logged.step_name, logged.key.epoch_name}
        if settings.logger and "logger" not in self.warned:
            self.warned.add("logger")
            warn(f"self.log({name!r}, logger=True) writes no row: the Trainer has no logger.", stacklevel=4)
        if self._others:
            refuse_shared(self._others, {}, metrics_in_use(self._module))
        if known is not None:
            logged.take_over(known)
        self.values[self.hook, name, self.loader] = logged
        return logged

    def _log_metric(self, logged: LoggedValue, metric: Metric) -> None:
        if logged.metric is None:
            logged.follow(metric, self._attribute_of(logged, metric))
        elif logged.metric is not metric:
            raise ValueError(
                f"self.log({logged.name!r}, ...) got another Metric than before in {self.hook}. Use a different name for each."
            )
        if logged.on_step:
            logged.show(step_value(logged.name, metric))

    def _attribute_of(self, logged: LoggedValue, metric: Metric) -> str:
        """Return the path of the module's attribute for a Metric. ValueError if the module does not have it."""
        given = logged.settings.metric_attribute
        if given is not None:
            if found_at(self._module, given) is not metric:
                raise ValueError(
                    f"self.log({logged.name!r}, metric_attribute={given!r}) got a Metric that {type(self._module).__name__} "
                    "does not hold there. Give the path of the attribute that holds it, or leave metric_attribute out."
                )
            return given
        if self._paths is None:
            self._paths = {id(child): path for path, child in self._module.named_modules() if is_metric(child)}
        attribute = self._paths.get(id(metric))
        if attribute is None:
            raise ValueError(
                f"self.log({logged.name!r}, ...) got a Metric that is not an attribute of the module. Assign it in __init__ "
                "(self.accuracy = ...), so that it moves to the device and is reset, or give its path as metric_attribute=."
            )
        return attribute

    def _found_batch_size(self, name: str) -> float:
        batch = self.batch
        if batch is not None and self._batch_size_of is not batch:
            sizes = sorted(sample_counts(batch))
            self._batch_size, self._batch_size_of = float(sizes[-1]) if sizes else 1.0, batch
            if len(sizes) != 1 and "batch size" not in self.warned:
                self.warned.add("batch size")
                found = f"the parts of this batch have leading sizes {sizes}"
                found = found if sizes else f"found no tensor in this batch ({a_type_of(batch)})"
                warn(
                    f"{found}, so the epoch mean of {name!r} is weighted by {self._batch_size:g}. Pass batch_size= to self.log "
                    "to set the batch size.",
                    stacklevel=4,
                )
        return 1.0 if batch is None else self._batch_size

    def warn_of_rows(self, rows: list[int]) -> None:
        """Warn, once per run, that a gather in an uneven round was padded. `rows` has a number for every rank."""
        if "rows" not in self.warned:
            self.warned.add("rows")
            rank_zero_warn(
                f"all_gather: in a last round the ranks have {', '.join(map(str, rows))} rows, since it has fewer samples than "
                "a full one. A rank with fewer repeats rows to fill up. With drop_last=True a training has no such round.",
                stacklevel=6,
            )


def merged(states: list[dict[str, Any]], module: nn.Module) -> tuple[dict[str, Any] | None, list[str]]:
    """Merge several ranks' states of an epoch. Also return the Metric objects that cannot be merged.

    The merged state is None if there are no states.
    """
    if len(states) < 2:
        return (states[0] if states else None), []
    values: dict[tuple[str, str], list[dict[str, Any]]] = {}
    metrics: dict[str, list[dict[str, Any]]] = {}
    for state in states:
        for each in state["values"]:
            values.setdefault((each["hook"], each["name"]), []).append(each)
        for path, each in state["metrics"].items():
            metrics.setdefault(path, []).append(each)
    together = {path: merge_states(found_at(module, path), each) for path, each in metrics.items()}
    kept = {path: each for path, each in together.items() if each is not None}
    return {"values": [LoggedValue.merged(each) for each in values.values()], "metrics": kept}, sorted(
        together.keys() - kept
    )


def flat_items(values: Any) -> list[tuple[str, Any]]:
    """Return the items of a dict, or the prefixed names and the metrics of a MetricCollection."""
    return list(values.items(keep_base=False, copy_state=False) if is_collection(values) else values.items())


def _in_words(batch: Any) -> str:
    """Return the dtypes and shapes of a batch's tensors, and the types of other values."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"{{{', '.join(f'{key!r}: {_in_words(each)}' for key, each in list(batch.items())[:8])}}}"
    return f"({', '.join(map(_in_words, batch[:8]))})" if isinstance(batch, (list, tuple)) else type(batch).__name__
