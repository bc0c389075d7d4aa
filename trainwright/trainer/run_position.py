"""Position: the counters, the phase and the RNG states of a run, which a checkpoint stores."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from enum import Enum, StrEnum, auto
from operator import attrgetter
from typing import Any

from trainwright.data.seeding import rng_state, set_rng_state
from trainwright.engine.window import AccumulationWindow
from trainwright.trainer.timeline import Timeline

OF_THE_END = ("epoch", "batch", "unchecked_batches", "schedulers_stepped", "epoch_ended")
"""The counters that change between an epoch's end and the next one's beginning."""

# The RNG states that a run returns to, by the names under which Position.rng has them.
EPOCH_START = "epoch start"
"""When the epoch began. A resumed run starts from it, because the hooks of the epoch's start use random numbers again."""
CHECKPOINT = "checkpoint"
"""Loaded from a checkpoint and not restored yet. A save until then stores it again."""
AFTER_EPOCH_START = "after the epoch's start"
"""Loaded from a checkpoint within an epoch. Restored once the hooks of the epoch's start have run again."""
EPOCH_LEFT = "epoch left"
"""After the latest batch of an epoch that the run stops within."""
VALIDATION = "validation"
"""When the running validation began."""
VALIDATION_LOADERS = "validation loaders"
"""For the next call of the hook that makes the validation loaders."""


class TrainerStatus(StrEnum):
    """How far the latest call is, as Lightning's `trainer.state` shows it."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Return whether the call has ended, in whatever way."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(StrEnum):
    """The call. A member equals the text that `setup` and `teardown` get."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(StrEnum):
    """The stage within the call."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)


class Phase(Enum):
    """The present activity of a run."""

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
        self.has_failed = False
        self._window: AccumulationWindow | None = None
        self.is_last_batch = False
        """Whether the current training batch is the epoch's last."""
        self.timeline = Timeline()
        self.batches_begun = 0
        """Training batches begun, the same on every rank unless one is further on."""
        self.batches_before = self.steps_before = self.skipped_before = 0
        """The run's batches, optimizer steps and skipped steps before the current training batch."""
        self.has_stepped = False
        """Whether an optimizer has stepped in the latest training batch."""
        self.unchecked_before = 0
        """The open window's batches before the current one, since no validation was due within the window."""

    def begin(self, call: str, window: AccumulationWindow | None) -> None:
        """Begin a call of the Trainer. `window` is the accumulation window of a fit."""
        self.phase, self.fn, self.status = Phase.OUTSIDE, TrainerFn(call), TrainerStatus.RUNNING
        self._window, self.has_failed = window, False

    def end(self, has_failed: bool) -> None:
        self.phase, self._window = Phase.OUTSIDE, None
        self.status = TrainerStatus.INTERRUPTED if has_failed else TrainerStatus.FINISHED

    @property
    def stage(self) -> RunningStage | None:
        """Return the stage within the call. None outside of a call."""
        if self.fn is None or self.status is not TrainerStatus.RUNNING:
            return None
        if self.fn is not TrainerFn.FITTING:
            return RunningStage(self.fn.value)
        if self.is_evaluating:
            return RunningStage.SANITY_CHECKING if self.is_sanity_check else RunningStage.VALIDATING
        return RunningStage.TRAINING

    def begin_batch(self, position: Position, is_last: bool) -> None:
        """Begin a training batch at this position of the run."""
        self.phase, self.is_last_batch = Phase.BATCH, is_last
        self.batches_before, self.steps_before = position.total_batches, position.step
        self.skipped_before = position.skipped_steps
        self.unchecked_before = position.unchecked_batches if self._window is not None and self._window.is_open else 0
        self.batches_begun += 1

    def cancel_batch(self) -> None:
        """Leave a training batch before its step."""
        self.batches_begun -= 1
        self.phase = Phase.BETWEEN_BATCHES

    @property
    def is_within_window(self) -> bool:
        """Return whether gradients wait for a step, in a window of several batches or after manual_backward."""
        return self._window is not None and self._window.is_open

    def end_batches(self, *, is_stopped: bool = False) -> None:
        """Leave the batch or the validation that ran; `is_stopped`: the run is saved because it stops."""
        self.phase = Phase.STOPPED if is_stopped else Phase.BETWEEN_BATCHES

    def fail(self, obstacle: str) -> None:
        """Record that the run has failed, and why it cannot be saved here, "" if it can."""
        self.obstacle, self.has_failed = obstacle, True
        # In EPOCH_LEFT a save would wait for an end of the epoch that does not come.
        if not obstacle and self.phase is Phase.EPOCH_LEFT:
            self.phase = Phase.STOPPED

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Set the phase within the block. If the block fails the phase stays, so that on_exception sees it."""
        outer, self.phase = self.phase, phase
        with self.timeline.during("validation" if phase in EVALUATING else "other"):
            yield
        self.phase = outer

    @property
    def is_in_batch(self) -> bool:
        return self.phase is Phase.BATCH

    @property
    def is_evaluating(self) -> bool:
        """Return whether an evaluation runs; the sanity check is one."""
        return self.phase in EVALUATING

    @property
    def is_sanity_check(self) -> bool:
        return self.phase is Phase.SANITY_CHECK

    @property
    def is_leaving(self) -> bool:
        """Return whether the run stops within the epoch of which the end's hooks run."""
        return self.phase is Phase.EPOCH_LEFT

    @property
    def is_mid_epoch_validation(self) -> bool:
        return self.phase is Phase.VALIDATION_WITHIN


@dataclass(frozen=True)
class OpenEpoch:
    """The state after the latest batch of a run that stops within an epoch, for the run's checkpoints.

    The run's end then calls on_train_epoch_end and reduces the epoch's metrics so far, which changes this state. A longer run
    that resumes from the checkpoint trains on as if the run had never stopped. The same command, with nothing left to train,
    ends the same way again.
    """

    metrics: dict[str, Any]
    """The latest value of each metric."""
    unfinished: dict[str, Any] | None
    """The values that this rank has logged in the epoch."""
    loggers: list[dict[str, Any]]
    callbacks: dict[str, Any] | None
    """States of the callbacks except ModelCheckpoints. None to read them at the save, if no ModelCheckpoint saves."""


@dataclass
class Position:
    """The counters, the phase and the RNG states of a run.

    `epoch` counts finished epochs. During an epoch it is that epoch's number from 0. `batch` counts the batches that this rank
    has finished in the epoch, and `total_batches` the batches of the run. `step` counts the optimizer steps of the run, and
    each optimizer's under manual optimization. `batches_that_stepped` counts the batches after which a step was made. From
    it the loggers' x axis follows (`logged_step`). `validations` counts the validations of the run. `validated_at` is
    `total_batches` as it was at the latest.
    `unchecked_batches` counts the batches, the current one included, since the latest check for a validation within the
    epoch. `schedulers_stepped` is True once an epoch's schedulers have stepped. A scheduler that follows a metric may
    still wait for its validation. `epoch_ended` is True when the epoch has no batch or validation left. Its
    number has not changed yet. `holds_gradients` is True while gradients of manual optimization wait over an epoch's end for
    a step. `schedulers_wait` is True while step-wise schedulers that follow a metric wait for the validation after their
    step. `saves` counts the checkpoints, which orders those of one step.

    All of them are valid at a different world size. An epoch resumed there continues from each rank's `batch`, with the rest of
    the data sharded again, so its number of batches differs from a whole epoch's.
    """

    epoch: int = 0
    batch: int = 0
    total_batches: int = 0
    step: int = 0
    batches_that_stepped: int = 0
    skipped_steps: int = 0
    validations: int = 0
    validated_at: int = -1
    unchecked_batches: int = 1
    schedulers_stepped: bool = False
    epoch_ended: bool = False
    holds_gradients: bool = False
    schedulers_wait: bool = False
    saves: int = 0
    loaded_end: dict[str, Any] | None = field(default=None, metadata={"counts": False})
    """Counters of a loaded checkpoint of an epoch's end, which next_epoch has changed. None once training begins."""
    rng: dict[str, Any] = field(default_factory=dict, metadata={"counts": False})
    """The RNG states of this rank that the run returns to, by name."""
    progress: Progress = field(default_factory=Progress, metadata={"counts": False})
    open_epoch: OpenEpoch | None = field(default=None, metadata={"counts": False})
    """Set when the run has stopped within the epoch."""

    def plain(self) -> dict[str, Any]:
        """Return everything except the phase, as plain data for a Trainer in another process."""
        plain = {one.name: copy.deepcopy(getattr(self, one.name)) for one in fields(self) if one.name != "progress"}
        return {**plain, "open_epoch": None if self.open_epoch is None else asdict(self.open_epoch)}

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> Position:
        """Return the position that `plain` has returned."""
        epoch = plain["open_epoch"]
        return cls(**{**plain, "open_epoch": None if epoch is None else OpenEpoch(**epoch)})

    def state_dict(self) -> dict[str, int]:
        """Return the counters as plain data. Until training begins, return the counters of a loaded epoch's end."""
        return {**self._counters(), **(self.loaded_end or {})}

    def is_where(self, saved: dict[str, Any]) -> bool:
        """Return whether a run resumed from a checkpoint with these counters would continue from here."""
        other, own = Position(), Position()
        other.load_state_dict(saved)
        # The number of saves orders checkpoints, and does not change where a run continues.
        own.load_state_dict({**self.state_dict(), "saves": other.saves})
        return own._counters() == other._counters()

    def _counters(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.metadata.get("counts", True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the counters. A counter that an older version did not know keeps its value."""
        vars(self).update({name: state[name] for name in self._counters() if name in state})
        # The checkpoint was saved before next_epoch, which the interrupted run would have called now.
        if self.epoch_ended:
            self.loaded_end = {name: getattr(self, name) for name in OF_THE_END}
            self.next_epoch()

    @contextmanager
    def at_loaded_end(self) -> Iterator[None]:
        """Return, within the block, to the counters with which a checkpoint of an epoch's end was saved."""
        end, self.loaded_end = self.loaded_end or {}, None
        now = {name: getattr(self, name) for name in end}
        vars(self).update(end)
        try:
            yield
        finally:
            vars(self).update(now)

    timeline = property(attrgetter("progress.timeline"), doc="The times of the fit, by phase.")
    fn = property(attrgetter("progress.fn"), doc="The Trainer's present or latest call.")
    stage = property(attrgetter("progress.stage"), doc="The stage within the call. None outside of a call.")
    status = property(attrgetter("progress.status"), doc="How far the call is.")
    stopped = property(attrgetter("progress.status.stopped"), doc="Whether the call has ended.")

    @property
    def finished(self) -> bool:
        return self.progress.status is TrainerStatus.FINISHED

    @property
    def logged_step(self) -> int:
        """Return the loggers' x value: during fit the steps before the latest batch, otherwise the total."""
        made = self.batches_that_stepped
        return made if self.progress.phase is Phase.EVALUATION else max(made - 1, 0)

    @property
    def shown_epoch(self) -> int:
        """Return the epoch's number. After a fit, the number of epochs trained, an unfinished one included."""
        return self.epoch + (self.open_epoch is not None and self.progress.phase is Phase.OUTSIDE)

    def mark_rng(self, name: str) -> None:
        """Remember this rank's present RNG state under a name."""
        self.rng[name] = rng_state()

    def restore_rng(self, name: str) -> None:
        """Restore the RNG state of this name, if it was marked, and drop the mark."""
        if (marked := self.rng.pop(name, None)) is not None:
            set_rng_state(marked)

    def begin_epoch(self) -> None:
        """Begin the epoch, or the rest of it."""
        self.mark_rng(EPOCH_START)
        for name in (CHECKPOINT, EPOCH_LEFT):
            self.rng.pop(name, None)
        self.open_epoch = self.loaded_end = None

    def end_batch(self, index: int) -> None:
        """Count the batches of the epoch up to `index`."""
        progress, taken = self.progress, index + 1 - self.batch
        self.batch = index + 1
        self.total_batches += taken
        self.unchecked_batches = progress.unchecked_before + taken
        progress.has_stepped = self.step != progress.steps_before
        self.batches_that_stepped += progress.has_stepped

    @property
    def has_made_step(self) -> bool:
        """Return whether the current batch made an optimizer step that was not skipped."""
        return self.step - self.progress.steps_before > self.skipped_steps - self.progress.skipped_before

    def count_steps(self, made: int, skipped: int) -> None:
        """Count optimizer steps, the skipped ones included."""
        self.step += made
        self.skipped_steps += skipped

    def count_manual_step(self, is_skipped: bool) -> None:
        """Count a step of manual optimization, after which no gradients wait any more."""
        self.count_steps(1, is_skipped)
        self.holds_gradients = False

    def count_save(self) -> int:
        """Count a checkpoint, and return its number."""
        self.saves += 1
        return self.saves

    def count_validation(self) -> None:
        self.validations += 1
        self.validated_at = self.total_batches

    def claim_epoch_schedulers(self) -> bool:
        """Return whether the epoch's schedulers have to step here, and count them as stepped."""
        was_stepped, self.schedulers_stepped = self.schedulers_stepped, True
        return not was_stepped

    def postpone_schedulers(self, is_due: bool) -> bool:
        """Let step-wise schedulers that follow a metric wait if a validation is due after their step; return `is_due`."""
        self.schedulers_wait = is_due
        return is_due

    def keep_gradients(self, window: AccumulationWindow) -> None:
        """Store gradients that wait over an epoch's end for a step of manual optimization, and begin another window."""
        self.holds_gradients = True
        window.drop()

    @contextmanager
    def ending_epoch(self, is_complete: bool) -> Iterator[None]:
        """Run the epoch's end in the block, or, unless it `is_complete`, the hooks of a run that stops within it."""
        with self.progress.during(Phase.EPOCH_END if is_complete else Phase.EPOCH_LEFT):
            yield
            self.epoch_ended = is_complete

    def stop_within_epoch(self, epoch: OpenEpoch) -> None:
        """Remember the state after the latest batch, which checkpoints store although the run's end changes it."""
        self.mark_rng(EPOCH_LEFT)
        self.open_epoch = epoch

    def resume(self, position: dict[str, Any], epoch_start: dict[str, Any] | None, rng: dict[str, Any] | None) -> None:
        """Load the counters of a checkpoint, and this rank's RNG states: at its epoch's start, and at the save."""
        self.load_state_dict(position)
        marked = {EPOCH_START: epoch_start, CHECKPOINT: rng}
        self.rng |= {name: state for name, state in marked.items() if state is not None}

    def may_save(self, weights_only: bool) -> bool:
        """Return whether a run could resume from a checkpoint that is written now.

        A checkpoint within an epoch has no gradients that wait for a step. A batch that is not counted would be trained
        twice. No run resumes within an epoch's end.
        """
        progress = self.progress
        is_counted = self.total_batches != progress.batches_before
        # In a batch that has failed, a save would wait for an end that does not come.
        is_within_batch = progress.is_in_batch and not is_counted and not progress.has_failed
        return not progress.is_within_window and (weights_only or not (is_within_batch or progress.phase in ENDING))

    def next_epoch(self) -> None:
        self.epoch, self.batch, self.epoch_ended, self.schedulers_stepped = self.epoch + 1, 0, False, False
        self.unchecked_batches = 0
        self.rng.pop(EPOCH_START, None)
