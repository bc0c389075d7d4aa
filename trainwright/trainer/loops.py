"""Loops: the limits and counters of a fit under the names of Lightning's loops, for scripts that read or set them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from trainwright.trainer.run_position import Position, RunningStage
from trainwright.trainer.settings import Settings


class Count(NamedTuple):
    """How many epochs, or batches of one, have begun and ended."""

    ready: int
    started: int
    processed: int
    completed: int


class Counted(NamedTuple):
    """The counts of the run, by `current` alone: they are those that a checkpoint holds."""

    current: Count


class EpochLoop:
    """`trainer.fit_loop.epoch_loop`: the batches and steps of a fit."""

    def __init__(self, state: Position) -> None:
        self._state = state

    @property
    def batch_idx(self) -> int:
        """Return the index of the epoch's latest batch; -1 before the first."""
        return self._state.batch - 1

    @property
    def total_batch_idx(self) -> int:
        """Return the index of the run's latest batch; -1 before the first."""
        return self._state.total_batches - 1

    @property
    def global_step(self) -> int:
        """Return the optimizer steps of the run."""
        return self._state.step

    @property
    def batch_progress(self) -> Counted:
        """Return how many batches of the epoch have begun and ended."""
        return Counted(_count(self._state.batch, self._state.progress.is_in_batch))


class FitLoop:
    """`trainer.fit_loop`: the limits of a fit, and its counters.

    `change` changes a setting by name, which the next fit takes; within a run it raises.
    """

    def __init__(self, settings: Settings, state: Position, change: Callable[[str, Any], None]) -> None:
        self._settings, self._state, self._change = settings, state, change
        self.epoch_loop = EpochLoop(state)

    @property
    def max_epochs(self) -> int:
        """The number of epochs to train; -1 for no limit."""
        last = self._settings.last_epoch
        return -1 if last is None else last

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._change("max_epochs", value)

    @property
    def min_epochs(self) -> int | None:
        """Epochs that are trained even if should_stop is set."""
        return self._settings.min_epochs

    @min_epochs.setter
    def min_epochs(self, value: int | None) -> None:
        self._change("min_epochs", value)

    @property
    def max_steps(self) -> int:
        """Optimizer steps to train; -1 for no limit."""
        return self._settings.max_steps

    @property
    def min_steps(self) -> int | None:
        """Steps that are trained even if should_stop is set."""
        return self._settings.min_steps

    @property
    def epoch_progress(self) -> Counted:
        """Return how many epochs have begun and ended."""
        state = self._state
        is_open = state.progress.stage is RunningStage.TRAINING and state.is_unfinished
        return Counted(_count(state.shown_epoch, is_open))


def _count(ended: int, is_open: bool) -> Count:
    begun = ended + is_open
    return Count(begun, begun, ended, ended)
