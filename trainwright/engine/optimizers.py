"""Optimizers: checks of `configure_optimizers` results and closures, and the clearing of gradients."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainwright.errors import a_type_of, did_you_mean
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.divided_optimizers import unwrap_optimizer

INTERVALS = ("epoch", "step", "validation")
AFTER_VALIDATIONS = "give a scheduler interval='validation', or see check_val_every_n_epoch and limit_val_batches"
"""The advice for a metric that is followed before a validation has logged it."""
ACCEPTED = (
    "an Optimizer, a list of them, a pair ([optimizers], [schedulers]), a dict with 'optimizer' and optionally "
    "'lr_scheduler', a list of such dicts, or None"
)
OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", "monitor")
SCHEDULER_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")
_TORCHS_ZERO_GRAD = Optimizer.zero_grad


@dataclass
class SchedulerConfig:
    """A scheduler and when it steps.

    It steps after every `frequency` of its `interval`: "epoch", "step" (an optimizer step) or "validation". `monitor` is the
    metric that a scheduler like ReduceLROnPlateau follows. `strict` makes it an error if that was not logged, and
    `reduce_on_plateau` says whether step() takes it. The learning rate is logged under `name`.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.scheduler, Optimizer):
            raise TypeError(
                f"a scheduler was expected, got the optimizer {type(self.scheduler).__name__}; the form of a pair is "
                "([optimizers], [schedulers])."
            )
        if self.interval not in INTERVALS:
            raise ValueError(
                f"interval={self.interval!r} of a scheduler is unknown; choose from {', '.join(INTERVALS)}."
            )
        if isinstance(self.frequency, bool) or not isinstance(self.frequency, int):
            raise TypeError(
                f"frequency={self.frequency!r} of a scheduler is {a_type_of(self.frequency)}; pass an integer."
            )
        if self.frequency < 1:
            raise ValueError(f"frequency={self.frequency} of a scheduler is below 1; pass how many {self.interval}s.")
        if self.reduce_on_plateau is None:
            self.reduce_on_plateau = isinstance(self.scheduler, ReduceLROnPlateau)

    @property
    def is_plateau(self) -> bool:
        """Return whether the scheduler's step takes a metric."""
        return bool(self.reduce_on_plateau)

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether the scheduler sets the rates of an optimizer, or of the optimizer that a strategy has wrapped."""
        scheduled = getattr(self.scheduler, "optimizer", None)
        return scheduled is optimizer or scheduled is unwrap_optimizer(optimizer)


def read_optimizers(returned: Any, *, is_manual: bool = False) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedulers from a `configure_optimizers` result, which the module steps if `is_manual`.

    Raises:
        TypeError: the result has another form.
        ValueError: a setting of a scheduler is wrong, or a key is unknown.
    """
    if returned is None:
        rank_zero_warn(
            "configure_optimizers returned None, so nothing will be trained; return an optimizer if that is not intended.",
            stacklevel=2,
        )
        return [], []
    optimizers, schedulers = _split(returned)
    configs = [_config(scheduler) for scheduler in schedulers]
    mappings = [scheduler for scheduler in schedulers if isinstance(scheduler, Mapping)]
    unread = [key for key in ("frequency", "monitor") if any(mapping.get(key) for mapping in mappings)]
    if is_manual and unread:
        rank_zero_warn(
            f"{' and '.join(unread)} of a scheduler have no effect under manual optimization; call the scheduler's "
            "step() in training_step or in a hook.",
            stacklevel=2,
        )
    for config in configs:
        check_scheduler(config, optimizers, is_manual)
    return optimizers, configs


def check_scheduler(config: SchedulerConfig, optimizers: Sequence[Optimizer], is_manual: bool = False) -> None:
    """Raise TypeError or ValueError for an object that is no scheduler of these optimizers."""
    scheduler, kind = config.scheduler, type(config.scheduler).__name__
    if not is_manual and not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"a scheduler was expected, got {a_type_of(scheduler)}; pass a torch LRScheduler, or an object "
            "with step() and state_dict()."
        )
    if not any(getattr(scheduler, "optimizer", optimizer) is optimizer for optimizer in optimizers):
        raise ValueError(
            f"the {kind} that configure_optimizers returned schedules an optimizer that it did not return; make it with one "
            "of those returned."
        )
    if config.is_plateau and config.monitor is None and not is_manual:
        raise ValueError(
            f"{kind} needs the metric to follow: return {{'scheduler': ..., 'monitor': 'val_loss'}} with a name that you log."
        )


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's step requires a closure, as in LBFGS."""
    first = next(iter(_step_parameters(optimizer)), None)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return first is not None and first.default is inspect.Parameter.empty and first.kind in positional


def may_use_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer needs a closure, or may call it more than once."""
    if needs_closure(optimizer):
        return True
    step = inspect.unwrap(type(optimizer).step)  # torch wraps the step of each class, for its profiler
    is_torchs = step.__module__.startswith("torch.optim.")  # which, except LBFGS, would call it once
    return not is_torchs and any(parameter.name == "closure" for parameter in _step_parameters(optimizer))


def _step_parameters(optimizer: Optimizer) -> list[inspect.Parameter]:
    return list(inspect.signature(type(optimizer).step).parameters.values())[1:]


def clear_gradients(optimizer: Optimizer) -> None:
    """Set the gradients of an optimizer to None, as its `zero_grad` does."""
    # Torch's zero_grad takes about 10 us for a profiler's region and for the needs of torch.compile.
    is_torchs = type(optimizer).zero_grad is _TORCHS_ZERO_GRAD and "zero_grad" not in vars(optimizer)
    if not is_torchs or profiler._is_profiler_enabled:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _split(returned: Any) -> tuple[list[Optimizer], list[Any]]:
    """Return the optimizers, and the schedulers or their dicts, of one of the accepted forms."""
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _split_mapping(returned, "")
    if not isinstance(returned, Sequence) or isinstance(returned, str) or not returned:
        raise TypeError(f"configure_optimizers returned {_shape(returned)}; expected {ACCEPTED}.")
    if len(returned) == 2 and isinstance(returned[0], (list, tuple)) and isinstance(returned[1], (list, tuple)):
        if not returned[0]:
            raise TypeError(f"configure_optimizers returned a pair without an optimizer; expected {ACCEPTED}.")
        _check_optimizers(returned[0], "of the optimizers that configure_optimizers returned")
        return list(returned[0]), list(returned[1])
    if not isinstance(returned[0], Mapping):
        _check_optimizers(returned, "of the configure_optimizers result")
        return list(returned), []
    optimizers: list[Optimizer] = []
    schedulers: list[Any] = []
    for index, item in enumerate(returned):
        if not isinstance(item, Mapping):
            raise TypeError(
                f"item {index} of the configure_optimizers result is {a_type_of(item)}, but the first is a dict; "
                "return only dicts with 'optimizer'."
            )
        more_optimizers, more_schedulers = _split_mapping(item, f"item {index} of ")
        optimizers += more_optimizers
        schedulers += more_schedulers
    return optimizers, schedulers


def _check_optimizers(values: Sequence[Any], where: str) -> None:
    for index, value in enumerate(values):
        _expect_optimizer(value, f"item {index} {where}")


def _expect_optimizer(value: Any, where: str) -> None:
    if isinstance(value, Optimizer):
        return
    hint = ""
    if isinstance(value, (LRScheduler, ReduceLROnPlateau)):
        hint = " Return ([optimizers], [schedulers]), a pair of lists."
    elif isinstance(value, type):
        hint = f" Make an instance of {value.__name__}."
    raise TypeError(f"{where} is {a_type_of(value)}, not an Optimizer; expected {ACCEPTED}.{hint}")


def _split_mapping(returned: Mapping[str, Any], where: str) -> tuple[list[Optimizer], list[Any]]:
    unknown = [key for key in returned if key not in OPTIMIZER_KEYS]
    if unknown or "optimizer" not in returned:
        raise ValueError(
            f"{where}the configure_optimizers result is a dict with the keys {list(returned)}; expected 'optimizer', "
            f"'lr_scheduler' and 'monitor'.{_suggestions(unknown, OPTIMIZER_KEYS)}"
        )
    _expect_optimizer(returned["optimizer"], f"'optimizer' of {where}the configure_optimizers result")
    scheduler = returned.get("lr_scheduler")
    if scheduler is None:
        return [returned["optimizer"]], []
    if not isinstance(scheduler, Mapping):
        scheduler = {"scheduler": scheduler}
    return [returned["optimizer"]], [{"monitor": returned.get("monitor"), **scheduler}]


def _config(scheduler: Any) -> SchedulerConfig:
    if not isinstance(scheduler, Mapping):
        return SchedulerConfig(scheduler)
    unknown = [key for key in scheduler if key not in SCHEDULER_KEYS]
    if "scheduler" not in scheduler:
        raise ValueError(
            f"a scheduler's dict has the keys {list(scheduler)}; 'scheduler' is required, and optional are "
            f"{', '.join(SCHEDULER_KEYS[1:])}.{_suggestions(unknown, SCHEDULER_KEYS)}"
        )
    if unknown:
        rank_zero_warn(
            f"a scheduler's dict has the keys {unknown}, which have no effect; expected {', '.join(SCHEDULER_KEYS)}."
            f"{_suggestions(unknown, SCHEDULER_KEYS)}",
            stacklevel=3,
        )
    return SchedulerConfig(**{key: scheduler[key] for key in SCHEDULER_KEYS if key in scheduler})


def _suggestions(unknown: Sequence[str], known: Sequence[str]) -> str:
    return "".join(did_you_mean(key, known) for key in unknown)


def _shape(returned: Any) -> str:
    if isinstance(returned, type):
        return f"the class {returned.__name__}, of which it should make an instance"
    if isinstance(returned, (list, tuple)):
        return f"{a_type_of(returned)} of {[type(part).__name__ for part in returned]}"
    return a_type_of(returned)
