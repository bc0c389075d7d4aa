"""Logbook: the metrics of a run as its user sees them, and their rows in the loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainwright.engine.engine import Engine
from trainwright.loggers.base import Logger
from trainwright.module import Module
from trainwright.trainer.metrics import LoggedValue, MetricCollector
from trainwright.trainer.reduction import Key, reduce_epoch
from trainwright.trainer.state import TrainerState


class Logbook:
    """Keeps the latest value of every metric and writes the loggers' rows (on rank 0)."""

    def __init__(self, loggers: Sequence[Logger], engine: Engine, state: TrainerState) -> None:
        self.collector: MetricCollector | None = None
        """Where self.log puts its values now."""
        self.is_silent = False
        """True during the sanity check, whose numbers are nobody's."""
        self._loggers = loggers if engine.rank == 0 else ()
        self._engine = engine
        self._state = state
        self._epoch_values: dict[Key, float] = {}
        self._step_values: dict[str, tuple[LoggedValue, Tensor | float]] = {}

    def start(self, module: Module, *, training: bool) -> MetricCollector:
        """Begin an epoch of training, or an evaluation: from now on self.log collects there."""
        self.collector = MetricCollector(module, training)
        return self.collector

    def log_step(self) -> None:
        """Write a row with the latest step values of this rank."""
        assert self.collector is not None
        self._write(to_numbers(self.collector.step_values(for_logger=True)))

    def finish(self, module: Module) -> dict[str, float]:
        """Reduce the epoch's values over the ranks, write them as a row and return them. Collective."""
        collector = self.collector
        assert collector is not None
        self._keep_steps(collector)
        reduced = reduce_epoch(collector, module, self._engine.world_size, self._engine.device)
        collector.clear()
        self.collector = None  # from here to the next start nothing is collected, and self.log says so
        if self.is_silent:
            return {}
        self._epoch_values.update(reduced)
        self._write({key.epoch_name: value for key, value in reduced.items() if key.logger})
        return {key.epoch_name: value for key, value in reduced.items()}

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Return every metric's latest value: an epoch's (over all ranks) where there is one, else this rank's step's."""
        self._keep_steps(self.collector)
        values: dict[str, Tensor] = {}
        for step_name, (logged, value) in self._step_values.items():
            values[logged.name] = values[step_name] = as_tensor(value)
        for key, number in self._epoch_values.items():
            values[key.name] = values[key.epoch_name] = as_tensor(number)
        return values

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Return the metrics that go to the loggers, under the names they have there."""
        self._keep_steps(self.collector)
        steps = {name: as_tensor(value) for name, (logged, value) in self._step_values.items() if logged.logger}
        return steps | {key.epoch_name: as_tensor(number) for key, number in self._epoch_values.items() if key.logger}

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Return the metrics that the progress bar shows. NOTE: reading step values waits for the device."""
        self._keep_steps(self.collector)
        shown = {name: value for name, (logged, value) in self._step_values.items() if logged.prog_bar}
        return {
            **to_numbers(shown),
            **{key.epoch_name: value for key, value in self._epoch_values.items() if key.prog_bar},
        }

    def flush(self) -> None:
        """Have the loggers write what they hold back."""
        for logger in self._loggers:
            logger.flush()

    def _keep_steps(self, collector: MetricCollector | None) -> None:
        """Remember the latest step values; they outlive the epoch that they were logged in."""
        if collector is None or self.is_silent:
            return
        for step_name, value in collector.step_values().items():
            name = step_name if step_name in collector.values else step_name.removesuffix("_step")
            self._step_values[step_name] = (collector.values[name], value)

    def _write(self, numbers: dict[str, float]) -> None:
        if not numbers or self.is_silent:
            return
        for logger in self._loggers:
            logger.log_metrics({"epoch": self._state.epoch, **numbers}, self._state.batches_that_stepped)


def as_tensor(value: Tensor | float) -> Tensor:
    """Return a python number as a float64 tensor, a tensor as it is."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def to_numbers(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return the values as python numbers, the tensors among them in one transfer from the device."""
    tensors = [value.double() for value in values.values() if isinstance(value, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    return {name: next(numbers) if isinstance(value, Tensor) else value for name, value in values.items()}
