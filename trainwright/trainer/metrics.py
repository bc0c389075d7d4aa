"""Metrics: what self.log collects during one epoch of training or one evaluation, and its exact reduction.

A value stays on its device: a step value is read when something shows it, an epoch value is summed there in float64. At
an epoch's end the (sum, weight) pairs of every key go over the ranks in one all_gather (see reduction.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainwright.module import is_metric

if TYPE_CHECKING:
    from torchmetrics import Metric

REDUCTIONS = ("mean", "sum", "min", "max")
SUMMED_AT_ONCE = 64
"""Values that wait on the device before they are summed up: one kernel for many values."""


class LoggedValue:
    """One name that is logged: its latest value and what the epoch has added up."""

    __slots__ = (
        "_pending", "_total", "_weight", "_weights", "attribute", "last", "logger", "metric", "name",
        "on_epoch", "on_step", "prog_bar", "reduce_fx", "spec",
    )  # fmt: skip

    def __init__(self, name: str, spec: tuple[Any, ...], on_step: bool, on_epoch: bool) -> None:
        self.name, self.spec = name, spec
        self.prog_bar, self.logger, self.reduce_fx = spec[0], spec[1], spec[4]
        self.on_step, self.on_epoch = on_step, on_epoch
        self.last: Tensor | float = 0.0
        self.metric: Metric | None = None
        self.attribute = ""
        self.clear()

    def clear(self) -> None:
        """Forget what the epoch has added up."""
        self._pending: list[Tensor] = []
        self._weights: list[float] = []
        self._total: Tensor | float | None = None
        self._weight = 0.0

    def add(self, value: Tensor | float, weight: float) -> None:
        """Add a value of an epoch; a tensor is kept on its device, not read."""
        self.last = value
        self._weight += weight
        if isinstance(value, Tensor):
            self._pending.append(value)
            self._weights.append(weight)
            if len(self._pending) == SUMMED_AT_ONCE:
                self._sum_up()
        else:
            self._combine(value * weight if self.reduce_fx == "mean" else value)

    def total(self) -> tuple[float, float]:
        """Return (reduced value, weight) of this rank: the weighted sum for a mean, else the sum, minimum or maximum."""
        self._sum_up()
        return (0.0 if self._total is None else float(self._total), self._weight)

    def _sum_up(self) -> None:
        if not self._pending:
            return
        values = torch.stack(self._pending).double()
        if self.reduce_fx == "mean":
            values = values * torch.tensor(self._weights, dtype=torch.float64, device=values.device)
        self._pending, self._weights = [], []
        reduced = values.min() if self.reduce_fx == "min" else values.max() if self.reduce_fx == "max" else values.sum()
        self._combine(reduced)

    def _combine(self, value: Tensor | float) -> None:
        if self._total is None:
            self._total = value
        elif self.reduce_fx in ("min", "max"):
            pair = [torch.as_tensor(each, dtype=torch.float64).to(getattr(value, "device", "cpu"))
                    for each in (self._total, value)]  # fmt: skip
            self._total = torch.minimum(*pair) if self.reduce_fx == "min" else torch.maximum(*pair)
        else:
            self._total = self._total + value


class MetricCollector:
    """What one stage logs between two of its epoch ends.

    Args:
        module: where torchmetrics objects are looked up.
        training: whether a value is a step's by default (else an epoch's).
    """

    def __init__(self, module: nn.Module, training: bool) -> None:
        self.values: dict[str, LoggedValue] = {}
        self.batch: Any = None
        """The batch that is being worked on; None between batches, where only epoch values may be logged."""
        self.silent = False
        """True while a batch is run whose results are thrown away."""
        self._module = module
        self._training = training
        self._batch_size: int | None = None
        self._batch_size_of: Any = None

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool,
        logger: bool,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: str,
        batch_size: int | None,
    ) -> None:
        """Take one value (the contract is Module.log's)."""
        if self.silent:
            return
        logged = self.values.get(name)
        if logged is None or logged.spec != (prog_bar, logger, on_step, on_epoch, reduce_fx):
            logged = self._first_time(name, (prog_bar, logger, on_step, on_epoch, reduce_fx), logged)
        if type(value) is Tensor or isinstance(value, Tensor):
            if value.dim() and value.numel() != 1:
                raise ValueError(
                    f"self.log({name!r}, ...) got a tensor of shape {tuple(value.shape)}; accepted is one element. "
                    "Reduce it first, for example with .mean()."
                )
            # On the host reading is the cheapest copy (0.3 us); on a device the copy stays there, since reading would wait.
            value = value.item() if value.is_cpu else value.detach().reshape(()).clone()
        elif isinstance(value, Real):  # numpy's numbers too
            value = float(value)
        elif is_metric(value):
            self._log_metric(logged, value)
            return
        else:
            raise TypeError(
                f"self.log({name!r}, ...) got a {type(value).__name__}; accepted are a number, a tensor of one element "
                "or a torchmetrics Metric."
            )
        if not logged.on_epoch:
            logged.last = value
            return
        weight = 1.0
        if reduce_fx == "mean":
            weight = float(batch_size) if batch_size is not None else self._found_batch_size(name)
        logged.add(value, weight)

    def _first_time(self, name: str, spec: tuple[Any, ...], known: LoggedValue | None) -> LoggedValue:
        """Make the entry of a new name; refuse one that is logged in two ways (ValueError)."""
        _, _, on_step, on_epoch, reduce_fx = spec
        if known is not None:
            raise ValueError(
                f"self.log({name!r}, ...) was called with other settings before in this epoch; use one setting for a name, "
                "or two names."
            )
        if name in ("step", "epoch"):
            raise ValueError(
                f"self.log({name!r}, ...) would take the place of the loggers' own column; choose another name."
            )
        if not isinstance(name, str):
            raise TypeError(f"a metric's name is a str; got {name!r}.")
        if reduce_fx not in REDUCTIONS:
            raise ValueError(f"reduce_fx={reduce_fx!r} is unknown; choose from {', '.join(REDUCTIONS)}.")
        between = self.batch is None
        on_step = (self._training and not between) if on_step is None else on_step
        on_epoch = (not self._training or between) if on_epoch is None else on_epoch
        if between and (on_step or not on_epoch):
            raise ValueError(
                f"self.log({name!r}, ...) was called between batches, where there is no step; leave on_step at False and "
                "on_epoch at True."
            )
        if not on_step and not on_epoch:
            raise ValueError(f"self.log({name!r}, ...) has on_step=False and on_epoch=False; set at least one of them.")
        logged = self.values[name] = LoggedValue(name, spec, on_step, on_epoch)
        return logged

    def _log_metric(self, logged: LoggedValue, metric: Metric) -> None:
        if logged.metric is not metric:
            attribute = next((name for name, child in self._module.named_modules() if child is metric), None)
            if attribute is None:
                raise ValueError(
                    f"self.log({logged.name!r}, ...) got a Metric that is no attribute of the module; assign it in "
                    "__init__ (self.accuracy = ...), so that it moves to the device and is reset."
                )
            logged.metric, logged.attribute = metric, attribute

    def _found_batch_size(self, name: str) -> float:
        if self.batch is None:
            return 1.0
        if self._batch_size_of is not self.batch:
            sizes = sorted(set(_leading_sizes(self.batch)))
            if not sizes:
                warnings.warn(
                    f"no tensor was found in this batch, a {type(self.batch).__name__}; the mean of {name!r} over the epoch "
                    "weighs each batch alike. Pass batch_size= to self.log to say which is the batch size.",
                    stacklevel=4,
                )
            if len(sizes) > 1:
                warnings.warn(
                    f"the tensors of this batch have leading sizes {sizes}; the mean of {name!r} over the epoch is "
                    f"weighted by {sizes[-1]}. Pass batch_size= to self.log to say which is the batch size.",
                    stacklevel=4,
                )
            self._batch_size = sizes[-1] if sizes else 1
            self._batch_size_of = self.batch
        return float(self._batch_size or 0)

    def step_values(self, *, for_logger: bool = False) -> dict[str, Tensor | float]:
        """Return the latest values that are logged by step (those of a logger's row), under their names there."""
        values: dict[str, Tensor | float] = {}
        for name, logged in self.values.items():
            if logged.on_step and logged.logger >= for_logger:
                last = _computed_step(logged.metric) if logged.metric is not None else logged.last
                values[f"{name}_step" if logged.on_epoch else name] = last
        return values

    def clear(self) -> None:
        """Start a new epoch: forget the values and reset the metrics that were logged."""
        for logged in self.values.values():
            if logged.metric is not None:
                logged.metric.reset()
        self.values.clear()
        self.batch = self._batch_size_of = None


def _computed_step(metric: Metric) -> Tensor | float:
    value = metric._forward_cache
    return value if isinstance(value, Tensor) else float("nan")


def _leading_sizes(batch: Any) -> list[int]:
    if isinstance(batch, Tensor):
        return [batch.shape[0]] if batch.dim() else []
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return [size for item in batch for size in _leading_sizes(item)]
    return []
