"""Logbook: the metrics of a run as the user sees them, and their rows in the loggers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainwright.engine.engine import Engine
from trainwright.faults.failing_loggers import outlived
from trainwright.loggers.base import Logger
from trainwright.loggers.folder import FolderLogger
from trainwright.loggers.position import logger_states
from trainwright.module import Module
from trainwright.trainer.logged_value import Key, Loader, to_numbers
from trainwright.trainer.metrics import MetricCollector
from trainwright.trainer.run_position import Position


class Logbook:
    """Keeps the latest value of every metric and writes the loggers' rows (on rank 0)."""

    def __init__(self, loggers: Sequence[Logger], engine: Engine, state: Position) -> None:
        self.collector: MetricCollector | None = None
        """The target of self.log. None if nothing is collected."""
        self.training_collector: MetricCollector | None = None
        """The collector of the training epoch, also while a validation within the epoch has another collector."""
        self.unfinished: dict[str, Any] | None = None
        """The logged values of a checkpoint within an epoch, until the epoch is resumed."""
        self.is_row_due = False
        """Whether the row of the latest step is due."""
        self.has_begun = False
        """Whether an epoch or an evaluation has begun. A sanity check does not count."""
        self.reductions = 0
        """Reductions over the ranks begun so far. Compared across ranks, they show which rank is behind."""
        self._loggers = loggers if engine.rank == 0 else ()  # only rank 0 writes
        self._engine, self._state = engine, state
        self._is_silent = False
        self._warned: set[str] = set()
        self._callback: dict[str, Tensor | float] = {}
        self._logged: dict[str, Tensor | float] = {}
        self._shown: dict[str, Tensor | float] = {}
        self._scored_at: dict[str, int] = {}
        """By metric of the latest validation, the optimizer step of the scored weights."""
        self._epoch_of: dict[str, int] = {}
        """By metric of the training, the epoch of its value."""
        self._evaluation_batches: dict[tuple[str, Loader | None], int] = {}
        """Batches of all evaluations of the run, by stage and loader."""
        self._stores: dict[str, dict[Any, Any]] = {
            **{"callback": self._callback, "logged": self._logged, "shown": self._shown},
            **{"scored_at": self._scored_at, "epoch_of": self._epoch_of},
            "evaluation_batches": self._evaluation_batches,
        }
        """What a checkpoint contains, by name."""
        self._held_rows: list[tuple[tuple[str, Loader | None], dict[str, float]]] = []
        """Rows of a validation within fit, until it ends: a run that abandons the validation writes them when resumed."""
        self._outer: MetricCollector | None = None
        """The collector before the running evaluation."""
        self._not_of_evaluation: dict[str, int] | None = None
        """The Metric objects in use before the running evaluation, with their updates. None between evaluations."""

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Write no rows in the block, a sanity check, and drop its values afterwards."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False
            for store in self._stores.values():
                store.clear()

    def start(self, module: Module, stage: str = "train") -> MetricCollector:
        """Begin a training epoch or an evaluation ("train", "validation" or "test"), for which self.log then collects."""
        self._keep_steps()  # of the collector before
        self.has_begun = self.has_begun or not self._is_silent
        collector = MetricCollector(module, stage, self._engine.rank, self._warned)
        if stage == "train":
            self.training_collector = collector
        else:
            self._outer, self._not_of_evaluation = self.collector, collector.in_use()
        self.collector = collector
        return collector

    def end_evaluation(self) -> None:
        """Return to the collector before the evaluation."""
        self.collector = self._outer
        self._outer = self._not_of_evaluation = None

    def stop_collecting(self) -> None:
        """Let self.log raise until the next start."""
        self.collector = None
        self.is_row_due = False

    @property
    def is_silenced(self) -> bool:
        """Return whether the batch's values are discarded: this rank only keeps collectives in step with other ranks."""
        return self.collector is not None and self.collector.silent

    def mark_row_due(self) -> None:
        """Request the row of the latest step, written at the batch's end or before a save."""
        self.is_row_due = True

    def log_step(self) -> None:
        """Write a row with the latest step values of this rank."""
        self.is_row_due = False
        if not self._loggers or self._is_silent:
            return
        self._write(self._step_values(), self._state.logged_step)

    def log_evaluation_step(self) -> None:
        """Write a row with the step values of a batch of the current loader.

        Its x value is the number of this loader's batches before it, those of the run's earlier evaluations included.
        """
        if not self._loggers or self._is_silent:
            return
        collector = self.collector
        assert collector is not None
        self._held_rows.append(((collector.stage, collector.loader), self._step_values()))
        if self.training_collector is None:  # outside of fit no run resumes from within
            self._write_held_rows()

    def _step_values(self) -> dict[str, float]:
        assert self.collector is not None
        steps = self.collector.steps()
        shown = [logged for logged in steps if logged.key.logger and logged.loader == self.collector.loader]
        return to_numbers({logged.step_name: logged.last for logged in shown if logged.last is not None})

    def reduce(self) -> None:
        """Reduce the epoch's values so far, so that the hooks of its end can read them. Collective.

        Values that those hooks log are reduced by `finish`, in a second gather.
        """
        collector = self.collector
        assert collector is not None
        self._keep_steps()
        self.reductions += 1
        for key, number in collector.reduce().items():
            self._show(key, key.epoch_name, number)
            # A score belongs to the weights of this step; after the next one it is outdated.
            is_score = collector is not self.training_collector
            dates, date = (self._scored_at, self._state.step) if is_score else (self._epoch_of, self._state.epoch)
            if not key.rank_zero_only:
                dates[key.base_name] = dates[key.epoch_name] = date

    def finish(self, num_loaders: int = 1) -> list[dict[str, float]]:
        """Reduce the epoch's values over the ranks, write them as a row and return them by loader. Collective.

        A value without a loader is in the dict of every loader. A value of rank 0 only is not returned.
        """
        assert self.collector is not None
        if self.training_collector not in (None, self.collector):
            self._refuse_shared(self.collector.metrics() | self.training_collector.metrics())
        self.reduce()  # without the values that are reduced already
        reduced = dict(self.collector.reduced)
        self.collector.clear()
        if self.collector is self.training_collector:
            self.training_collector = None
        self.stop_collecting()
        self._write_held_rows()
        row = {key.epoch_name: number for key, number in reduced.items() if key.logger}
        self._write(row, self._state.logged_step)
        common = [(key, number) for key, number in reduced.items() if not key.rank_zero_only]
        return [
            {key.epoch_name: number for key, number in common if key.loader in (-1, index)}
            for index in range(num_loaders)
        ]

    def _refuse_shared(self, paths: set[str]) -> None:
        """Reject a Metric that training has updated and the running evaluation too (ValueError)."""
        now = self.collector.in_use() if self.collector is not None else {}
        for path, updates in (self._not_of_evaluation or {}).items():
            if path in paths and now.get(path) != updates:
                name = path.rpartition(".")[2]
                raise ValueError(
                    f"the Metric {path!r} is updated in training and in validation, so the value that self.log computes from "
                    f"it would mix their samples. Create one for each, such as self.train_{name} and self.val_{name}; where "
                    "they are to be mixed, log the value of its compute()."
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the latest value of every metric, for a checkpoint. NOTE: waits for the device."""
        # A sanity check's values are dropped at its end, so no save within it may keep them.
        if self._is_silent:
            return {}
        self._keep_steps()
        counts = ("scored_at", "epoch_of", "evaluation_batches")
        return {name: dict(store) if name in counts else to_numbers(store) for name, store in self._stores.items()}

    def load_state_dict(self, state: dict[str, Any], unfinished: dict[str, Any] | None = None) -> None:
        """Load the latest values from a checkpoint, of which an older version may lack some.

        `unfinished` is the epoch's part of a checkpoint within an epoch, kept until the epoch is resumed.
        """
        if unfinished is not None:
            self.unfinished = unfinished
        for name, store in self._stores.items():
            store.update(state.get(name, {}))

    def logger_states(self) -> list[dict[str, Any]]:
        """Return the loggers' positions for a checkpoint, after a flush. Empty on ranks other than 0."""
        return logger_states(self._loggers)

    def note_checkpoint(self, path: str) -> None:
        """Let the loggers record the folder of a checkpoint."""
        for logger in self._loggers:
            if isinstance(logger, FolderLogger):
                logger.note_checkpoint(path)

    def drop_later_rows(self) -> None:
        """Let the loggers of a resumed run drop the rows after its checkpoint, which the run writes again."""
        for logger in self._loggers:
            if isinstance(logger, FolderLogger):
                logger.drop_later_rows()

    def epoch_state(self) -> dict[str, Any] | None:
        """Return this rank's logged values of the training epoch, for a checkpoint. None between two epochs.

        Metric objects that only the running evaluation has used are omitted.
        """
        if self._state.batch == 0 or self._state.epoch_ended:
            return None
        if self.unfinished is not None or self.training_collector is None:
            return self.unfinished
        return self.training_collector.state_dict(self._not_of_evaluation)

    def monitored(self, name: str, asker: str) -> float:
        """Return a metric that `asker` follows. ValueError with the logged names if it was not logged."""
        self._keep_steps()
        metrics = self._callback  # of which epoch values are not rounded
        if name not in metrics:
            early = f" No validation has run yet: if it logs {name!r}, pass validation data, and give a scheduler "
            early += "interval='validation'. See also check_val_every_n_epoch and limit_val_batches."
            raise ValueError(
                f"{asker} follows {name!r}, which was not logged; there are {', '.join(sorted(metrics)) or 'no metrics'}. "
                f"Log it with self.log, or change monitor.{'' if self._state.validations else early}"
            )
        return float(metrics[name])  # NOTE: waits for the device if the value is a step's

    def is_outdated(self, name: str) -> bool:
        state = self._state
        is_earlier = state.epoch_ended and self._epoch_of.get(name, state.epoch) != state.epoch
        return is_earlier or self._scored_at.get(name, state.step) != state.step

    def resume_epoch(self) -> None:
        """Resume the epoch's values from the checkpoint, in place of values logged again by the hooks of the epoch's start."""
        state, self.unfinished = self.unfinished, None
        if state is not None:
            assert self.collector is not None
            self.collector.load_state_dict(state, self._engine.device)

    def record(self, values: Mapping[str, float]) -> None:
        """Add a callback's values, the same on every rank, to the callback metrics."""
        self._callback.update(values)

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Latest values of the metrics: an epoch's over all ranks, a training step's of this rank."""
        self._keep_steps()
        return _as_tensors(self._callback)

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        self._keep_steps()
        return _as_tensors(self._logged)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The progress bar's metrics. NOTE: reading step values waits for the device."""
        self._keep_steps()
        return to_numbers(self._shown)

    def flush(self) -> None:
        for logger in self._loggers:
            outlived(logger, "flush")

    def _keep_steps(self) -> None:
        """Keep new step values, which stay visible after the epoch that logged them."""
        collector = self.collector
        for logged in collector.steps() if collector is not None else ():
            value = logged.take_new()
            if value is not None:
                self._show(logged.key, logged.step_name, value, to_callbacks=collector is self.training_collector)

    def _show(self, key: Key, name: str, value: Tensor | float, to_callbacks: bool = True) -> None:
        """Show a value under a name to the loggers and the progress bar, and under the base name too to callbacks."""
        if to_callbacks and not key.rank_zero_only:
            for shown in (key.base_name, name):
                self._callback[shown] = value
                self._scored_at.pop(shown, None)
                self._epoch_of.pop(shown, None)
        if key.logger:
            self._logged[name] = value
        if key.prog_bar:
            self._shown[name] = value

    def _write_held_rows(self) -> None:
        held, self._held_rows = self._held_rows, []
        for counter, numbers in held:
            before = self._evaluation_batches.get(counter, 0)
            self._evaluation_batches[counter] = before + 1
            self._write(numbers, before)

    def _write(self, numbers: dict[str, float], step: int) -> None:
        """Write a row. A metric named step replaces its x value, and a metric named epoch the number of the epoch."""
        if not numbers or self._is_silent or not self._loggers:
            return
        step = int(numbers.pop("step", step))
        for logger in self._loggers:
            outlived(logger, "log_metrics", {"epoch": self._state.epoch, **numbers}, step)


def format_table(title: str, metrics: Sequence[Mapping[str, float]], loaders: Sequence[str | None] = (None,)) -> str:
    """Return a table with a row for every metric and a column for every loader, without the loaders' suffixes.

    `loaders` has the name of every loader, or None.
    """
    heads = ["value"] if [*loaders] == [None] else [name or f"loader {index}" for index, name in enumerate(loaders)]
    rows: dict[str, list[str]] = {}
    for index, values in enumerate(metrics):
        for name, value in values.items():
            base_name = name.removesuffix(f"/dataloader_idx_{index}")
            rows.setdefault(base_name, [""] * len(metrics))[index] = f"{value:.6g}"
    table = [[title, *heads], *([name, *cells] for name, cells in rows.items())]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(["", *map(str.ljust, line, widths)]).rstrip() for line in table]
    rule = "-" * max(map(len, lines))
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def _as_tensors(values: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """Return the values as tensors of torch's default dtype."""
    return {name: torch.as_tensor(value, dtype=torch.get_default_dtype()) for name, value in values.items()}
