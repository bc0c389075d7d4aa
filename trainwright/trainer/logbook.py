"""Logbook: the metrics of a run as its user sees them, and their rows in the loggers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from trainwright.engine.engine import Engine
from trainwright.loggers.base import Logger
from trainwright.loggers.folder import FolderLogger
from trainwright.loggers.position import logger_states
from trainwright.module import Module
from trainwright.trainer.logged_value import Key, Loader, as_tensor, expanded, to_numbers
from trainwright.trainer.metric_objects import metrics_in_use
from trainwright.trainer.metrics import MetricCollector
from trainwright.trainer.reduction import end_loader, reduce_epoch
from trainwright.trainer.state import TrainerState


class Logbook:
    """Keeps the latest value of every metric and writes the loggers' rows (on rank 0)."""

    def __init__(self, loggers: Sequence[Logger], engine: Engine, state: TrainerState) -> None:
        self.collector: MetricCollector | None = None
        """Where self.log puts its values now."""
        self.training_collector: MetricCollector | None = None
        """The one of the training epoch, also while a validation within the epoch has its own."""
        self.unfinished: dict[str, Any] | None = None
        """What a checkpoint within an epoch holds of that epoch, until it is resumed."""
        self.owes_row = False
        """Whether the row of the latest step is still to be written."""
        self.has_begun = False
        """Whether an epoch or an evaluation has begun, the sanity check aside."""
        self._loggers = loggers if engine.rank == 0 else ()
        self._engine = engine
        self._state = state
        self._is_silent = False
        self.reductions = 0
        """Reductions over the ranks that were begun, alike on every rank: what tells which rank is further on."""
        self._warned: set[str] = set()
        self._batches: dict[tuple[str, Loader | None], int] = {}
        """Batches of the running evaluation, by stage and loader."""
        self._earlier_batches: dict[tuple[str, Loader | None], int] = {}
        self._callback: dict[str, Tensor | float] = {}
        self._logged: dict[str, Tensor | float] = {}
        self._shown: dict[str, Tensor | float] = {}
        self._scored_at: dict[str, int] = {}
        """The optimizer step whose weights got a metric, for those that a validation gave last."""
        self._held_rows: list[tuple[dict[str, float], int]] = []
        """Rows of the batches of a validation within fit, until it is over: a resumed run makes one anew that was left."""
        self._outer: MetricCollector | None = None
        """What collected when the running evaluation began."""
        self._not_of_evaluation: set[str] | None = None
        """The Metric objects that were in use then; None while no evaluation runs."""

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Write no row in the block, a sanity check, and forget its numbers afterwards."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False
            for kept in (self._callback, self._logged, self._shown):
                kept.clear()

    def start(self, module: Module, *, training: bool, stage: str = "") -> MetricCollector:
        """Begin an epoch of training, or an evaluation: from now on self.log collects there.

        The stage is "train", "validation" or "test".
        """
        self._keep_steps()
        self.has_begun = self.has_begun or not self._is_silent
        stage = stage or ("train" if training else "validation")
        collector = MetricCollector(module, training, stage, self._engine.rank, self._warned)
        if training:
            self.training_collector = collector
        else:
            self._outer, self._not_of_evaluation = self.collector, metrics_in_use(module)
        self.collector = collector
        return collector

    def end_evaluation(self) -> None:
        """End an evaluation: from now on self.log collects where it did before."""
        self.collector, self._outer, self._not_of_evaluation = self._outer, None, None

    def stop_collecting(self) -> None:
        """Collect nothing until the next start; self.log says so."""
        self.collector, self.owes_row = None, False

    @property
    def is_silenced(self) -> bool:
        """Return whether the batch's values are discarded: this rank only keeps collectives in step with other ranks."""
        return self.collector is not None and self.collector.silent

    def owe_row(self) -> None:
        """Note that the row of the latest step is due: `log_step` writes it, at the batch's end or before a save."""
        self.owes_row = True

    def log_step(self) -> None:
        """Write a row with the latest step values of this rank."""
        self.owes_row = False
        if not self._loggers or self._is_silent:
            return
        assert self.collector is not None
        values = {each.step_name: each.last for each in self.collector.steps() if each.logger and each.last is not None}
        self._write(to_numbers(values), self._state.batches_that_stepped)

    def log_evaluation_step(self, batch_idx: int) -> None:
        """Write a row with the step values of a batch of the current loader.

        Its x value is the number of this loader's batches before it, those of earlier evaluations of the run included.
        """
        if not self._loggers or self._is_silent:
            return
        collector = self.collector
        assert collector is not None
        counter = (collector.stage, collector.loader)
        self._batches[counter] = batch_idx + 1
        values = {
            each.step_name: each.last
            for each in collector.steps()
            if each.logger and each.last is not None and each.loader == collector.loader
        }
        if values:
            self._held_rows.append((to_numbers(values), self._earlier_batches.get(counter, 0) + batch_idx))
            if self.training_collector is None:  # no fit goes on from within
                self._write_held_rows()

    def end_loader(self, module: Module) -> None:
        """End one of several evaluation loaders: its Metric objects are computed, and start anew with the next. Collective.

        Call it on every rank, also on one without a batch, while `collector.loader` is still the one that ends.
        """
        assert self.collector is not None
        self._keep_steps()
        end_loader(self.collector, module)

    def reduce(self, module: Module) -> None:
        """Reduce what the epoch has logged so far, so that the hooks of its end can read it. Collective.

        What they log themselves is reduced by `finish`; so an epoch with this call has two gathers, one without it one.
        """
        collector = self.collector
        assert collector is not None
        self._keep_steps()
        self.reductions += 1
        reduced = reduce_epoch(collector, module, self._engine.world_size, self._engine.device, collector.reduced)
        collector.keep_reduced(reduced)
        for key, number in expanded(reduced).items():
            self._keep_epoch(key, number)

    def finish(self, module: Module, num_loaders: int = 1) -> list[dict[str, float]]:
        """Reduce the epoch's values over the ranks, write them as a row and return them by loader. Collective.

        A value that belongs to no loader stands in the dict of each. What is rank 0's alone is not returned.
        """
        self.reduce(module)
        assert self.collector is not None
        reduced = expanded(self.collector.reduced)
        self.collector.clear()
        if self.collector is self.training_collector:
            self.training_collector = None
        self.stop_collecting()
        self._write_held_rows()
        for counter, count in self._batches.items():
            self._earlier_batches[counter] = self._earlier_batches.get(counter, 0) + count
        self._batches.clear()
        row = {key.epoch_name: number for key, number in reduced.items() if key.logger}
        self._write(row, self._state.batches_that_stepped)
        shared = [(key, number) for key, number in reduced.items() if not key.rank_zero_only]
        return [
            {key.epoch_name: number for key, number in shared if key.loader in (-1, index)}
            for index in range(num_loaders)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the latest value of every metric as numbers, for a checkpoint. NOTE: waits for the device."""
        if self._is_silent:
            return {}
        self._keep_steps()
        return {
            "callback": to_numbers(self._callback),
            "logged": to_numbers(self._logged),
            "shown": to_numbers(self._shown),
            "evaluation_batches": dict(self._earlier_batches),
            "scored_at": dict(self._scored_at),
        }

    def latest(self) -> dict[str, Any]:
        """Return the latest value of every metric as its user sees it, for the Trainer of another process."""
        return {"callback": self.callback_metrics, "logged": self.logged_metrics, "shown": self.progress_bar_metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the latest values from a checkpoint; one of another version may lack some."""
        for name, values in (("callback", self._callback), ("logged", self._logged), ("shown", self._shown)):
            values.update(state.get(name, {}))
        self._earlier_batches.update(state.get("evaluation_batches", {}))
        self._scored_at.update(state.get("scored_at", {}))

    def logger_states(self) -> list[dict[str, Any]]:
        """Return where the loggers stand, for a checkpoint; empty on ranks other than 0. Rows that wait are written first."""
        return logger_states(self._loggers)

    def drop_later_rows(self) -> None:
        """Have the loggers of a resumed run drop the rows after its checkpoint, which the run writes again."""
        for logger in self._loggers:
            if isinstance(logger, FolderLogger):
                logger.drop_later_rows()

    def epoch_state(self) -> dict[str, Any] | None:
        """Return what was logged so far in the epoch that is trained, for this rank's part of a checkpoint.

        None between two epochs. Metric objects that nobody had used when the running evaluation began are not the epoch's.
        """
        if self._state.batch == 0 or self._state.epoch_ended:
            return None
        if self.unfinished is not None or self.training_collector is None:
            return self.unfinished
        return self.training_collector.state_dict(self._not_of_evaluation)

    def forget_evaluation(self, latest: dict[str, Any]) -> None:
        """Go back, where a run stops within an evaluation, to the latest values as they were before it."""
        for kept in (self._callback, self._logged, self._shown, self._scored_at):
            kept.clear()
        self.load_state_dict(latest)
        self._batches.clear()
        self._held_rows.clear()

    def monitored(self, name: str, asker: str) -> float:
        """Return a metric that `asker` follows; ValueError naming the logged ones if it was not logged."""
        metrics = self.callback_metrics
        if name not in metrics:
            raise ValueError(
                f"{asker} follows {name!r}, which was not logged; there are {', '.join(sorted(metrics)) or 'no metrics'}. "
                "Log it with self.log, or change monitor."
            )
        return float(metrics[name])

    def keep_unfinished(self, state: dict[str, Any] | None) -> None:
        """Keep what a checkpoint within an epoch holds of that epoch, until the epoch is resumed."""
        self.unfinished = state

    def is_outdated(self, name: str) -> bool:
        """Return whether a metric is a validation's, of other weights than the present ones."""
        return self._scored_at.get(name, self._state.step) != self._state.step

    def take_up_epoch(self) -> None:
        """Go on with what a checkpoint holds of the epoch; what the hooks of its start have logged again gives way to it."""
        state, self.unfinished = self.unfinished, None
        if state is not None:
            assert self.collector is not None
            self.collector.load_state_dict(state, self._engine.device)

    def note(self, values: Mapping[str, float]) -> None:
        """Put values that a callback has read off, alike on every rank, among the callback metrics."""
        self._callback.update(values)

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Return every metric's latest value: training's by step and by epoch, an evaluation's by epoch.

        An epoch's value is over all ranks, a step's this rank's own. What is rank 0's alone is not among them.
        """
        self._keep_steps()
        return {name: as_tensor(value) for name, value in self._callback.items()}

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Return the metrics that go to the loggers, under the names they have there."""
        self._keep_steps()
        return {name: as_tensor(value) for name, value in self._logged.items()}

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Return the metrics that the progress bar shows. NOTE: reading step values waits for the device."""
        self._keep_steps()
        return to_numbers(self._shown)

    def flush(self) -> None:
        """Have the loggers write what they hold back."""
        for logger in self._loggers:
            logger.flush()

    def _keep_steps(self) -> None:
        """Take over the step values that are new; they outlive the epoch that they were logged in."""
        collector = self.collector
        for each in collector.steps() if collector is not None else ():
            value = each.last
            if value is None or value is each.kept:
                continue
            each.kept = value
            if collector is not None and collector.training and not each.rank_zero_only:
                self._callback[each.base_name] = self._callback[each.step_name] = value
                self._scored_at.pop(each.base_name, None)
                self._scored_at.pop(each.step_name, None)
            if each.logger:
                self._logged[each.step_name] = value
            if each.prog_bar:
                self._shown[each.step_name] = value

    def _keep_epoch(self, key: Key, number: float) -> None:
        if not key.rank_zero_only:
            self._callback[key.base_name] = self._callback[key.epoch_name] = number
            for name in (key.base_name, key.epoch_name):
                self._scored_at.pop(name, None)
                if self.collector is not self.training_collector:
                    self._scored_at[name] = self._state.step
        if key.logger:
            self._logged[key.epoch_name] = number
        if key.prog_bar:
            self._shown[key.epoch_name] = number

    def _write_held_rows(self) -> None:
        held, self._held_rows = self._held_rows, []
        for numbers, step in held:
            self._write(numbers, step)

    def _write(self, numbers: dict[str, float], step: int) -> None:
        """Write a row; a metric that is called step takes the place of its x value, one that is called epoch stays."""
        if not numbers or self._is_silent or not self._loggers:
            return
        step = int(numbers.pop("step", step))
        for logger in self._loggers:
            logger.log_metrics({"epoch": self._state.epoch, **numbers}, step)
