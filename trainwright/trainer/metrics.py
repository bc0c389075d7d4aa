"""Metrics: the values that self.log collects during one epoch of training or one evaluation.

A value stays on its device: a step value is read only to be shown, an epoch value is summed there in float64. At an epoch's
end one gather carries the keys of every rank with their (value, weight) pairs, since a rank without batches has logged
nothing. A torchmetrics object gathers its own state, in the same order on every rank. logged_value.py says which hooks may log.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, islice
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainwright.data.batch_stream import sample_counts
from trainwright.distributed import collectives
from trainwright.errors import a_type_of
from trainwright.rank_zero import rank_zero_warn, warn
from trainwright.trainer.logged_value import Key, Loader, LoggedValue, LogSettings, read_all
from trainwright.trainer.vendor import (
    compute_metrics,
    found_at,
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
    """

    def __init__(self, module: nn.Module, stage: str = "train", rank: int = 0, warned: set[str] | None = None) -> None:
        self.values: dict[tuple[str, str, Loader | None], LoggedValue] = {}
        """The logged values, by hook, name and loader."""
        self.hook = ""
        """The running step or hook."""
        self.loader: Loader | None = None
        """The current evaluation loader. None between loaders, and for a single loader without a name."""
        self.batch: Any = None
        """The current batch. None between batches."""
        self.index = 0
        """The number of the current batch in its epoch or loader."""
        self.silent = False
        """True during a batch whose results are discarded."""
        self.is_uneven = False
        """True during a batch of a round in which ranks may have different numbers of samples."""
        self.stage = stage
        self.computed: dict[Key, float] = {}
        """The values of the Metric objects of loaders that have ended, the same on all ranks."""
        self.reduced: dict[Key, float] = {}
        """The epoch values that were reduced over all ranks."""
        self.warned: set[str] = set() if warned is None else warned
        self._module, self._rank = module, rank
        self._batch_size = 1.0
        self._batch_size_of: Any = None  # the batch itself: an id may be used again

    def begin_loader(self, loader: Loader | None) -> None:
        """Begin an evaluation loader, or end the latest batches if it is None."""
        self.loader = loader
        self.batch = None

    def begin_batch(self, batch: Any, index: int, step: str = "training_step", is_uneven: bool = False) -> None:
        """Begin a batch of a step, whose hook may log from here on."""
        self.batch, self.index = batch, index
        self.hook, self.is_uneven = step, is_uneven

    def annotate(self, error: BaseException) -> None:
        """Add a batch's number and contents to an error of its step or of a hook with it."""
        kinds = (RuntimeError, ValueError, TypeError, LookupError)
        if self.batch is None or not isinstance(error, kinds):
            return
        if any(frame.f_code.co_name == self.hook for frame, _ in walk_tb(error.__traceback__)):
            error.add_note(f"In {self.hook}, with batch {self.index}: {_in_words(self.batch)}.")

    def begin_uneven_round(self, silent: bool) -> None:
        """Begin a round in which ranks have different numbers of samples. With `silent` this rank has none."""
        self.is_uneven = True
        self.silent = silent

    def end_uneven_round(self) -> None:
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
                for key, part in flat_items(value):
                    self.log(f"{name}/{key}", part, settings, batch_size)
                return
            logged = self._begin(name, LogSettings(*settings), logged)
        if type(value) not in (Tensor, float) and is_metric(value):
            self._log_metric(logged, value)
            return
        if logged.is_ignored:
            return
        weight: float = 1.0
        if logged.on_epoch and logged.reduce_fx == "mean":
            if batch_size is None:
                weight = self._found_batch_size(name)
            else:
                is_usual = type(batch_size) is int and batch_size > 0
                weight = batch_size if is_usual else check_batch_size(name, batch_size)
        logged.add(value, weight)

    def steps(self) -> list[LoggedValue]:
        return [logged for logged in self.values.values() if logged.on_step and logged.last is not None]

    def metrics(self) -> set[str]:
        """Return the paths of the Metric objects that were logged."""
        return {path for logged in self.values.values() if (path := logged.key.attribute)}

    def in_use(self) -> dict[str, int]:
        """Return how often each of the module's Metric objects was updated since its reset, by path, without zeros."""
        metrics = {path: child for path, child in self._module.named_modules() if is_metric(child)}
        return {path: metric.update_count for path, metric in metrics.items() if metric.update_count}

    def end_loader(self) -> None:
        """Compute and reset the Metric objects of the current loader. Collective: call on every rank."""
        # The module is the same on all ranks, so all return here or none does.
        if self.loader is None or not any(is_metric(child) for child in self._module.modules()):
            return
        of_loader = [logged for logged in self.values.values() if logged.loader == self.loader and logged.on_epoch]
        ranks = collectives.gather_object([list(logged.key) for logged in of_loader if logged.key.attribute])
        keys = {Key(*fields) for rank in ranks for fields in rank}
        self.computed.update(compute_metrics(self._module, keys))
        reset_metrics(self._module, keys)

    def reduce(self) -> dict[Key, float]:
        """Reduce the epoch values that `reduced` lacks over all ranks, and return them. Collective: call on every rank.

        They are in the order of logging, a value of rank 0 only on rank 0. Metric objects are computed, not reset.
        """
        counting = [logged for logged in self.values.values() if logged.on_epoch and not logged.is_ignored]
        values = {logged.key: logged for logged in counting if logged.key not in self.reduced}
        computed = {key: number for key, number in self.computed.items() if key not in self.reduced}
        of_ranks = _gathered(_pairs_of(values), [*values, *computed])
        computed |= compute_metrics(self._module, [key for key in of_ranks if key.attribute and key not in computed])
        reduced = {key: computed[key] if key.attribute else _combine(key, of_ranks[key]) for key in of_ranks}
        self.reduced.update(reduced)
        return reduced

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
        in_use = self.in_use()
        metrics = states_of_metrics(self._module, in_use if only is None else in_use.keys() & set(only))
        return {"values": _states_of(list(self.values.values())), "metrics": metrics}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Replace this epoch's logged values by a checkpoint's. `device` is the device of this rank."""
        self.values.clear()
        for value in state["values"]:
            if value["attribute"] and not is_metric(found_at(self._module, value["attribute"])):
                continue  # the module no longer has it
            logged = LoggedValue.restored(value, device, self._rank)
            self.values[logged.key.hook, logged.name, None] = logged
        restore_metrics(self._module, state["metrics"])

    def _begin(self, name: str, settings: LogSettings, known: LoggedValue | None) -> LoggedValue:
        """Add the entry of a name that is new in this hook, or continue from the checkpoint's entry (`known`).

        Raises:
            ValueError: the name is logged with other settings than before.
        """
        if not isinstance(name, str):
            raise TypeError(f"a metric's name is a str; self.log got {name!r}, {a_type_of(name)}. Use str(...).")
        if known is not None and not known.is_restored:
            pairs = zip(settings._fields, known.settings, settings, strict=True)
            changes = ", ".join(f"{field}={old!r} and then {new!r}" for field, old, new in pairs if old != new)
            raise ValueError(
                f"self.log({name!r}, ...) was called in {self.hook} with {changes}. Use one setting for a name, or two names."
            )
        if settings.sync_dist_group is not None:
            raise ValueError(
                f"self.log({name!r}, ...) got sync_dist_group={settings.sync_dist_group!r}; only None is accepted, as epoch "
                "values are reduced over all ranks. Leave it out, or reduce over the group yourself before logging."
            )
        logged = LoggedValue(self.hook, name, self.loader, settings, self._rank)
        same = (value for value in self.values.values() if value.key.base_name == logged.key.base_name and value.loader)
        if self.loader is not None and any(value.loader != self.loader for value in same):
            raise ValueError(
                f"self.log({name!r}, add_dataloader_idx=False) is called with two loaders, whose values would be mixed "
                "under one name. Leave add_dataloader_idx at True, or use a different name for each loader."
            )
        if known is not None:
            logged.take_over(known)
        self.values[self.hook, name, self.loader] = logged
        return logged

    def _log_metric(self, logged: LoggedValue, metric: Metric) -> None:
        if logged.key.rank_zero_only:
            raise ValueError(
                f"self.log({logged.name!r}, ...) got a Metric with rank_zero_only=True; a Metric gathers its state over all "
                "ranks. Leave rank_zero_only out."
            )
        path = logged.key.attribute or logged.settings.metric_attribute
        if not path:
            path = next((path for path, child in self._module.named_modules() if child is metric), "")
        if found_at(self._module, path) is not metric:
            raise ValueError(
                f"self.log({logged.name!r}, ...) got a Metric that is not an attribute of the module, or is another one than "
                "before. Assign it in __init__ (self.accuracy = ...), so that it moves to the device and is reset, and log "
                "every Metric under a name of its own."
            )
        logged.observe(path, step_value(logged.name, metric) if logged.on_step else None)

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


def merged(states: list[dict[str, Any]]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return several ranks' values of an epoch as one state, and the paths of Metric objects, whose states are dropped.

    The state is None if there are no states.
    """
    values: dict[tuple[str, str], LoggedValue] = {}
    for value in (value for state in states for value in state["values"]):
        logged = LoggedValue.restored(value, torch.device("cpu"))  # on the host, where sums are float64
        first = values.setdefault((logged.key.hook, logged.name), logged)
        if first is not logged:
            first.absorb(logged)
    paths = sorted({path for state in states for path in state["metrics"]})
    return ({"values": _states_of(list(values.values())), "metrics": {}} if states else None), paths


def _pairs_of(values: Mapping[Key, LoggedValue]) -> dict[Key, list[float]]:
    """Return [value, weight] of every plain value. NOTE: waits for the device."""
    totals = {key: logged.total() for key, logged in values.items() if not key.attribute}
    numbers = read_all([total for total, _ in totals.values()])
    return {key: [number, totals[key][1]] for key, number in zip(totals, numbers, strict=True)}


def _gathered(pairs: dict[Key, list[float]], keys: list[Key]) -> dict[Key, list[list[float]]]:
    """Return the pairs of all ranks by key, this rank's `keys` first. Collective: call on every rank."""
    of_ranks = {key: [pairs[key]] if key.rank_zero_only else [] for key in keys}
    shared = [[list(key), pairs.get(key, [])] for key in keys if not key.rank_zero_only]
    for fields, pair in chain.from_iterable(collectives.gather_object(shared)):
        of_ranks.setdefault(Key(*fields), []).append(pair)
    return of_ranks


def _combine(key: Key, pairs: list[list[float]]) -> float:
    totals = [total for total, weight in pairs if weight > 0]
    if not totals:
        return float("nan")
    if key.reduce_fx in ("min", "max"):
        values = torch.tensor(totals, dtype=torch.float64)
        return float(values.min() if key.reduce_fx == "min" else values.max())  # NaN if one is NaN
    return sum(totals) / (sum(weight for _, weight in pairs) if key.reduce_fx == "mean" else 1)


def check_batch_size(name: str, batch_size: Any) -> float:
    """Return a batch size as a float; ValueError unless it is a positive number."""
    if not isinstance(batch_size, Tensor):
        with suppress(TypeError, ValueError):
            if 0 < float(batch_size) < float("inf"):
                return float(batch_size)
    raise ValueError(
        f"self.log({name!r}, ...) got batch_size={batch_size!r}, {a_type_of(batch_size)}. Expected a positive number. Read a "
        "tensor with .item(), which waits for the device, and omit the call for a batch that has nothing to average."
    )


def flat_items(values: Any) -> list[tuple[str, Any]]:
    """Return the items of a dict, or the prefixed names and the metrics of a MetricCollection."""
    return list(values.items(keep_base=False, copy_state=False) if is_collection(values) else values.items())


def _in_words(batch: Any) -> str:
    """Return the dtypes and shapes of a batch's tensors, and the types of other values."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"{{{', '.join(f'{key!r}: {_in_words(value)}' for key, value in list(batch.items())[:8])}}}"
    return f"({', '.join(map(_in_words, batch[:8]))})" if isinstance(batch, (list, tuple)) else type(batch).__name__


def _states_of(logged_values: list[LoggedValue]) -> list[dict[str, Any]]:
    numbers_of = [logged.numbers() for logged in logged_values]
    rest = iter(read_all([number for numbers in numbers_of for number in numbers]))  # one transfer for all
    pairs = zip(logged_values, numbers_of, strict=True)
    return [logged.state_dict(list(islice(rest, len(numbers)))) for logged, numbers in pairs]
