"""State: the counters of a run, in one object that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from trainwright.trainer.phase import Phase, Progress
from trainwright.trainer.states import RunningStage, TrainerFn, TrainerStatus

OF_THE_END = ("epoch", "batch", "unchecked_batches", "schedulers_stepped", "epoch_ended")
"""The counters that change between an epoch's end and the next one's beginning."""


@dataclass(frozen=True)
class OpenEpoch:
    """What the end of a run within an epoch would change, as the latest batch has left it, for the run's checkpoints.

    The run calls on_train_epoch_end there and reduces the epoch's metrics so far. A longer run that resumes from its checkpoint
    trains on instead, as if it had never stopped; the same command, with nothing left to train, ends the same way again.
    """

    metrics: dict[str, Any]
    """The latest value of each metric."""
    unfinished: dict[str, Any] | None
    """What this rank has logged in the epoch."""
    loggers: list[dict[str, Any]]
    callbacks: dict[str, Any] | None
    """Their states, except ModelCheckpoints'; None to read them at the save, if no ModelCheckpoint saves."""
    generators: dict[str, Any]


@dataclass
class TrainerState:
    """The counters of a run.

    `epoch` counts finished epochs, so during an epoch it is that epoch's number from 0. `batch` counts the batches that
    this rank has finished in the epoch, `total_batches` those of the run, `step` the optimizer steps of the run (each
    optimizer's under manual optimization), `batches_that_stepped` the batches after which a step was made, from which the
    loggers' x axis follows (`logged_step`). `validations` counts the validations of the run, and `validated_at` is
    `total_batches` as it was at the latest.
    `unchecked_batches` counts the batches, the current one included, since the latest check whether a validation is due
    within the epoch. `schedulers_stepped` is True once an epoch's schedulers have stepped, except those that follow a metric:
    its validation may not have run yet. `epoch_ended` is True when the epoch has no batch or validation left, but its number
    has not changed yet. `holds_gradients` is True while gradients of manual optimization wait over an epoch's end for a step.
    `schedulers_wait` is True while step-wise schedulers that follow a metric wait for the validation after their step.
    `saves` counts the checkpoints, which orders those of one step.

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
    epoch_generators: dict[str, Any] | None = field(default=None, metadata={"counts": False})
    """This rank's generators as they were when the epoch began: the hooks of its start draw from them again when resumed."""
    loaded_end: dict[str, Any] | None = field(default=None, metadata={"counts": False})
    """What next_epoch has changed after a checkpoint of an epoch's end was loaded, until training begins."""
    loaded_generators: dict[str, Any] | None = field(default=None, metadata={"counts": False})
    """This rank's generators as a checkpoint holds them, until they are set."""
    progress: Progress = field(default_factory=Progress, metadata={"counts": False})
    open_epoch: OpenEpoch | None = field(default=None, metadata={"counts": False})
    """Set when the run has stopped within the epoch."""

    def plain(self) -> dict[str, Any]:
        """Return everything except the phase, which belongs to this process, as plain data for a Trainer in another one."""
        return {name: value for name, value in asdict(self).items() if name != "progress"}

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> TrainerState:
        """Return the state that `plain` has returned."""
        epoch = plain["open_epoch"]
        return cls(**{**plain, "open_epoch": None if epoch is None else OpenEpoch(**epoch)})

    def state_dict(self) -> dict[str, int]:
        """Return the counters as plain data; those of the end that was loaded, until training begins."""
        return {**self._counters(), **(self.loaded_end or {})}

    def is_where(self, saved: dict[str, Any]) -> bool:
        """Return whether a run resumed from a checkpoint with these counters would continue from here."""
        other, own = TrainerState(), TrainerState()
        other.load_state_dict(saved)
        # The number of saves orders checkpoints, and does not change where a run continues.
        own.load_state_dict({**self.state_dict(), "saves": other.saves})
        return own._counters() == other._counters()

    def _counters(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.metadata.get("counts", True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the counters; one that an older version did not know keeps its value."""
        for each in fields(self):
            if each.metadata.get("counts", True) and each.name in state:
                # Types of fields are texts here, under `from __future__ import annotations`.
                setattr(self, each.name, (bool if each.type == "bool" else int)(state[each.name]))
        # The checkpoint was saved before next_epoch, which the interrupted run would have called now.
        if self.epoch_ended:
            self.loaded_end = {name: getattr(self, name) for name in OF_THE_END}
            self.next_epoch()

    @contextmanager
    def at_loaded_end(self) -> Iterator[None]:
        """Have, in the block, the counters with which a checkpoint of an epoch's end was saved."""
        end, self.loaded_end = self.loaded_end or {}, None
        now = {name: getattr(self, name) for name in end}
        vars(self).update(end)
        try:
            yield
        finally:
            vars(self).update(now)

    @property
    def fn(self) -> TrainerFn | None:
        """Return the Trainer's present or latest call."""
        return self.progress.fn

    @property
    def stage(self) -> RunningStage | None:
        """Return what runs within the call; None outside of one."""
        return self.progress.stage

    @property
    def status(self) -> TrainerStatus:
        """Return how far the call is."""
        return self.progress.status

    @property
    def finished(self) -> bool:
        """Return whether the call has ended without an exception."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Return whether the call has ended."""
        return self.status.stopped

    @property
    def logged_step(self) -> int:
        """Return the loggers' x value: in a fit the steps before that of the latest batch, else those that were made."""
        made = self.batches_that_stepped
        return made if self.progress.phase is Phase.EVALUATION else max(made - 1, 0)

    @property
    def shown_epoch(self) -> int:
        """Return the epoch's number; after a fit the epochs that were trained, one that was left within it included."""
        return self.epoch + (self.open_epoch is not None and self.progress.phase is Phase.OUTSIDE)

    @property
    def is_unfinished(self) -> bool:
        """Return whether an epoch has begun and not ended."""
        return self.batch > 0 and not self.epoch_ended

    def begin_epoch(self, generators: dict[str, Any]) -> None:
        """Begin the epoch, or the rest of it, with these generators."""
        self.epoch_generators, self.open_epoch = generators, None
        self.loaded_end = self.loaded_generators = None

    def end_batch(self, index: int, unchecked: int, stepped: bool) -> None:
        """Count the batches of the epoch up to `index`; `unchecked` as before them, `stepped`: an optimizer has stepped."""
        taken = index + 1 - self.batch
        self.batch, self.total_batches, self.unchecked_batches = (
            index + 1,
            self.total_batches + taken,
            unchecked + taken,
        )
        self.batches_that_stepped += stepped

    def count_steps(self, made: int, skipped: int) -> None:
        """Count optimizer steps, those of them that were skipped included."""
        self.step += made
        self.skipped_steps += skipped

    def count_save(self) -> None:
        """Count a checkpoint."""
        self.saves += 1

    def count_validation(self) -> None:
        """Count a validation after the latest batch."""
        self.validations += 1
        self.validated_at = self.total_batches

    def hold_gradients(self, holds: bool) -> None:
        """Note whether gradients wait over an epoch's end."""
        self.holds_gradients = holds

    def note_schedulers_stepped(self) -> None:
        """Note that the epoch's schedulers have stepped, except those that follow a metric."""
        self.schedulers_stepped = True

    def let_schedulers_wait(self, wait: bool) -> None:
        """Note whether step-wise schedulers that follow a metric wait for the validation after their step."""
        self.schedulers_wait = wait

    def leave_epoch(self, left: OpenEpoch) -> None:
        """Note what a checkpoint holds where the run stops within the epoch."""
        self.open_epoch = left

    def end_epoch(self, is_complete: bool) -> None:
        """Note that the epoch has no batch and no validation left, or that the run stops within it."""
        self.epoch_ended = is_complete

    def resume(self, position: dict[str, Any], epoch_generators: dict[str, Any] | None) -> None:
        """Take the counters of a checkpoint, and this rank's generators at its epoch's start."""
        self.load_state_dict(position)
        self.epoch_generators = epoch_generators

    def load_generators(self, generators: dict[str, Any] | None) -> None:
        """Keep the generators of a checkpoint for saves until they are set (None)."""
        self.loaded_generators = generators

    def next_epoch(self) -> None:
        """Advance to the next epoch."""
        self.epoch, self.batch, self.epoch_ended, self.schedulers_stepped = self.epoch + 1, 0, False, False
        self.unchecked_batches = 0
        self.epoch_generators = None
