"""Loops: the limits and counters of a fit under the names of Lightning's loops, for scripts that read or set them there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer


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

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def batch_idx(self) -> int:
        """Return the index of the epoch's latest batch; -1 before the first."""
        return self._trainer.state.batch - 1

    @property
    def total_batch_idx(self) -> int:
        """Return the index of the run's latest batch; -1 before the first."""
        return self._trainer.state.total_batches - 1

    @property
    def global_step(self) -> int:
        """Return the optimizer steps of the run."""
        return self._trainer.global_step

    @property
    def batch_progress(self) -> Counted:
        """Return how many batches of the epoch have begun and ended."""
        state = self._trainer.state
        return Counted(_count(state.batch, state.progress.is_in_batch))


class FitLoop:
    """`trainer.fit_loop`: the limits of a fit, which the next one takes as it finds them, and its counters."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.epoch_loop = EpochLoop(trainer)

    @property
    def max_epochs(self) -> int:
        """The number of epochs to train; -1 for no limit."""
        return self._trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._trainer.max_epochs = value  # type: ignore[assignment]

    @property
    def min_epochs(self) -> int | None:
        """Epochs that are trained even if should_stop is set."""
        return self._trainer.min_epochs

    @min_epochs.setter
    def min_epochs(self, value: int | None) -> None:
        self._trainer.min_epochs = value

    @property
    def max_steps(self) -> int:
        """Optimizer steps to train; -1 for no limit."""
        return self._trainer.max_steps

    @property
    def min_steps(self) -> int | None:
        """Steps that are trained even if should_stop is set."""
        return self._trainer.min_steps

    @property
    def epoch_progress(self) -> Counted:
        """Return how many epochs have begun and ended."""
        state = self._trainer.state
        return Counted(_count(self._trainer.current_epoch, state.is_unfinished and self._trainer.training))


def _count(ended: int, is_open: bool) -> Count:
    begun = ended + is_open
    return Count(begun, begun, ended, ended)
