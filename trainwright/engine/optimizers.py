"""Optimizers: what `configure_optimizers` may return, read into one form and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

INTERVALS = ("epoch", "step")
ACCEPTED = (
    "an Optimizer, a list of them, a pair ([optimizers], [schedulers]), or a dict with 'optimizer' and, if wanted, "
    "'lr_scheduler'"
)


@dataclass
class SchedulerConfig:
    """A scheduler and when it steps.

    `interval` is "epoch" or "step" (an optimizer step), `frequency` how many of these pass between two of its steps,
    `monitor` the metric that ReduceLROnPlateau follows.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.scheduler, LRScheduler) and not callable(getattr(self.scheduler, "step", None)):
            raise TypeError(
                f"a scheduler was expected, got a {type(self.scheduler).__name__}; pass a torch LRScheduler, or an object "
                "with step() and state_dict()."
            )
        if self.interval not in INTERVALS:
            raise ValueError(
                f"interval={self.interval!r} of a scheduler is unknown; choose from {', '.join(INTERVALS)}."
            )
        if self.frequency < 1:
            raise ValueError(f"frequency={self.frequency} of a scheduler is below 1; pass how many {self.interval}s.")
        if self.is_plateau and self.monitor is None:
            raise ValueError(
                "ReduceLROnPlateau needs the metric to follow: return {'scheduler': ..., 'monitor': 'val_loss'} with a name "
                "that you log."
            )

    @property
    def is_plateau(self) -> bool:
        """Return whether the scheduler's step takes a metric."""
        return isinstance(self.scheduler, ReduceLROnPlateau)


def read_optimizers(returned: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and the schedulers that `configure_optimizers` gave.

    Raises:
        TypeError: it returned something else (or nothing).
        ValueError: a setting of a scheduler is wrong, or a key is unknown.
    """
    optimizers, schedulers = _split(returned)
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise TypeError(
            f"configure_optimizers returned {_shape(returned)}; accepted are {ACCEPTED}. "
            "Did you forget the return statement?"
            if returned is None
            else f"configure_optimizers returned {_shape(returned)}; accepted are {ACCEPTED}."
        )
    configs = [_config(each) for each in schedulers]
    for config in configs:
        if not any(getattr(config.scheduler, "optimizer", each) is each for each in optimizers):
            raise ValueError(
                f"the {type(config.scheduler).__name__} that configure_optimizers returned schedules an optimizer that "
                "it did not return; make it with one of those returned."
            )
    return optimizers, configs


def _split(returned: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        unknown = set(returned) - {"optimizer", "lr_scheduler", "monitor"}
        if unknown or "optimizer" not in returned:
            raise ValueError(
                f"configure_optimizers returned a dict with the keys {sorted(returned)}; accepted are 'optimizer', "
                "'lr_scheduler' and 'monitor'."
            )
        scheduler = returned.get("lr_scheduler")
        if scheduler is None:
            return [returned["optimizer"]], []
        if not isinstance(scheduler, Mapping):
            scheduler = {"scheduler": scheduler}
        return [returned["optimizer"]], [{"monitor": returned.get("monitor"), **scheduler}]
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        if len(returned) == 2 and all(isinstance(part, Sequence) for part in returned):
            return list(returned[0]), list(returned[1])
        if returned and all(isinstance(part, Mapping) for part in returned):
            parts = [_split(part) for part in returned]
            return [each for part in parts for each in part[0]], [each for part in parts for each in part[1]]
        return list(returned), []
    return [], []


def _config(scheduler: Any) -> SchedulerConfig:
    if not isinstance(scheduler, Mapping):
        return SchedulerConfig(scheduler)
    unknown = set(scheduler) - {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}
    if unknown or "scheduler" not in scheduler:
        raise ValueError(
            f"a scheduler's dict has the keys {sorted(scheduler)}; accepted are 'scheduler', 'interval', 'frequency' and "
            "'monitor'."
        )
    return SchedulerConfig(
        scheduler["scheduler"],
        scheduler.get("interval", "epoch"),
        scheduler.get("frequency", 1),
        scheduler.get("monitor"),
    )


def _shape(returned: Any) -> str:
    if isinstance(returned, (list, tuple)):
        return f"a {type(returned).__name__} of {[type(part).__name__ for part in returned]}"
    return f"a {type(returned).__name__}"
