"""Phase: what a run is doing now, one value with one writer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

from trainwright.engine.window import AccumulationWindow
from trainwright.trainer.states import RunningStage, TrainerFn, TrainerStatus


class Phase(Enum):
    """What a run is doing."""

    OUTSIDE = auto()
    """No loop runs: the run is set up or taken down."""
    SANITY_CHECK = auto()
    BETWEEN_BATCHES = auto()
    BATCH = auto()
    """From a training batch's fetch to the end of its on_train_batch_end hooks."""
    VALIDATION_WITHIN = auto()
    """A validation within an epoch."""
    EPOCH_END = auto()
    """From an epoch's last batch until all schedulers have stepped for it."""
    VALIDATION_AT_END = auto()
    """The validation in it."""
    EPOCH_LEFT = auto()
    """The run stops within an epoch, and reduces the epoch's metrics so far."""
    STOPPED = auto()
    """The run is saved because a signal or an exception has stopped it; a resumed run does the rest of an epoch's end."""
    EVALUATION = auto()
    """validate, test or predict."""


EVALUATING = frozenset({Phase.SANITY_CHECK, Phase.VALIDATION_WITHIN, Phase.VALIDATION_AT_END, Phase.EVALUATION})
ENDING = frozenset({Phase.EPOCH_END, Phase.VALIDATION_AT_END, Phase.EPOCH_LEFT})
"""Phases in which no run could resume from a checkpoint, so that it is written after the epoch's end."""


class Progress:
    """The phase of a run."""

    def __init__(self) -> None:
        self.phase = Phase.OUTSIDE
        self.fn: TrainerFn | None = None
        """The latest call."""
        self.status = TrainerStatus.INITIALIZING
        self.obstacle = ""
        """Why a failed run cannot be resumed exactly from here; "" if it can."""
        self._window: AccumulationWindow | None = None
        self.is_last_batch = False
        """Whether the current training batch is the epoch's last."""
        self.batches_begun = 0
        """Training batches begun, the same on every rank unless one is further on."""
        self.batches_before = self.steps_before = 0
        """The run's batches and optimizer steps before the current training batch."""

    def begin(self, call: str) -> None:
        """Begin a call of the Trainer."""
        self.phase, self.fn, self.status = Phase.OUTSIDE, TrainerFn(call), TrainerStatus.RUNNING

    def end(self, has_failed: bool) -> None:
        """End it."""
        self.phase = Phase.OUTSIDE
        self.status = TrainerStatus.INTERRUPTED if has_failed else TrainerStatus.FINISHED

    @property
    def stage(self) -> RunningStage | None:
        """Return what runs within the call; None outside of one."""
        if self.fn is None or self.status is not TrainerStatus.RUNNING:
            return None
        if self.fn is not TrainerFn.FITTING:
            return RunningStage(self.fn.value)
        if self.is_evaluating:
            return RunningStage.SANITY_CHECKING if self.is_sanity_check else RunningStage.VALIDATING
        return RunningStage.TRAINING

    def begin_batch(self, is_last: bool, batches_before: int, steps_before: int) -> None:
        """Begin a training batch, before which the run has made so many batches and optimizer steps."""
        self.phase, self.is_last_batch = Phase.BATCH, is_last
        self.batches_before, self.steps_before = batches_before, steps_before
        self.batches_begun += 1

    def leave_batch(self) -> None:
        """Leave a training batch before its step."""
        self.batches_begun -= 1

    def follow(self, window: AccumulationWindow | None) -> None:
        """Know the window of the loop that runs; None once it has ended."""
        self._window = window

    @property
    def is_within_window(self) -> bool:
        """Return whether gradients wait for a step, in a window of several batches or after manual_backward."""
        return self._window is not None and self._window.is_open

    def enter(self, phase: Phase) -> None:
        """Enter a phase."""
        self.phase = phase

    def fail(self, obstacle: str) -> None:
        """Note that the run has failed, and why it cannot be saved here; "" if it can."""
        self.obstacle = obstacle
        # In EPOCH_LEFT a save would wait for an end of the epoch that does not come.
        if not obstacle and self.phase is Phase.EPOCH_LEFT:
            self.phase = Phase.STOPPED

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in a phase within the block. If the block fails the phase stays, for on_exception to see."""
        outer, self.phase = self.phase, phase
        yield
        self.phase = outer

    @property
    def is_in_batch(self) -> bool:
        """Return whether a training batch runs."""
        return self.phase is Phase.BATCH

    @property
    def is_evaluating(self) -> bool:
        """Return whether an evaluation runs; the sanity check is one."""
        return self.phase in EVALUATING

    @property
    def is_sanity_check(self) -> bool:
        """Return whether the sanity check runs."""
        return self.phase is Phase.SANITY_CHECK

    @property
    def is_leaving(self) -> bool:
        """Return whether the run stops within the epoch of which the end's hooks run."""
        return self.phase is Phase.EPOCH_LEFT

    @property
    def is_mid_epoch_validation(self) -> bool:
        """Return whether a validation within a training epoch runs."""
        return self.phase is Phase.VALIDATION_WITHIN
