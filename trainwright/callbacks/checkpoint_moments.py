"""The moments at which a ModelCheckpoint may save: which of them it has been called at, and which it is still to be."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer


class Moments:
    """The latest optimizer step, validation and epoch's end that a ModelCheckpoint was called at.

    Callbacks save one after the other. A checkpoint that the first of them has written stands at a moment that the next one was
    not called at: where the run ended right then, it is called when the run resumes.
    """

    def __init__(self) -> None:
        self._step = self._step_before = self._validations = self._ended_at = -1
        self._saved_at = (-1, -1)
        """The optimizer steps and the batches of the run at the latest save."""
        self._is_validated = False
        """Whether the end that comes next was validated."""
        self.steps: dict[str, int] = {}
        """The optimizer steps of what was saved at each path that is kept."""
        self._is_known = False
        """Whether it is known what was before."""

    def begin(self, trainer: Trainer) -> None:
        """Take what was before for known, where no checkpoint says what was: nothing of it was to be saved by this callback."""
        if not self._is_known:
            self._validations, self._ended_at = trainer.state.validations, trainer.state.total_batches
            self._is_known = True

    def note_step(self, trainer: Trainer) -> bool:
        """Note that the optimizer step at hand is known; return whether it was not."""
        is_new = trainer.global_step != self._step
        self._step = trainer.global_step
        return is_new

    def note_save(self, trainer: Trainer, paths: Collection[str], kept: Collection[str]) -> None:
        """Note that the run is saved where it stands, at these paths, and which are kept beside them."""
        self._saved_at = trainer.global_step, trainer.state.total_batches
        self.steps = {path: step for path, step in self.steps.items() if path in kept}
        self.steps.update(dict.fromkeys(paths, trainer.global_step))

    def is_saved(self, trainer: Trainer) -> bool:
        """Return whether the run is saved where it stands, or will have been when the save in hand is done."""
        return self._saved_at == (trainer.global_step, trainer.state.total_batches)

    def note_validation(self, trainer: Trainer, is_within: bool) -> None:
        """Note that the validation at hand, `is_within` an epoch or at its end, is known."""
        self._validations, self._is_validated = trainer.state.validations, not is_within

    def take_validated(self) -> bool:
        """Return whether the end at hand was validated, once."""
        is_validated, self._is_validated = self._is_validated, False
        return is_validated

    def note_end(self, trainer: Trainer) -> None:
        """Note that the end at hand, of an epoch or of a run that stops within one, is known."""
        self._ended_at = trainer.state.total_batches

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {
            "step": max(self._step, self._step_before),
            "saved_at": list(self._saved_at),
            "steps": dict(self.steps),
            "is_validated": self._is_validated,
            "validations": self._validations,
            "ended_at": self._ended_at,
        }

    def load_state_dict(self, state: dict[str, Any], is_here: bool) -> None:
        """Take back what `state_dict` returned; a checkpoint of an older version knows of steps alone.

        `is_here`: whether the latest save is in the folder of this run.
        """
        self._step_before, self._is_known = int(state["step"]), "ended_at" in state
        if self._is_known:
            self._validations, self._ended_at = int(state["validations"]), int(state["ended_at"])
            self._is_validated, self.steps = bool(state["is_validated"]), dict(state["steps"])
            step, batches = state["saved_at"]
            self._saved_at = (int(step), int(batches)) if is_here else (-1, -1)

    def misses_step(self, trainer: Trainer, every: int) -> bool:
        """Return whether a run resumes after an optimizer step that is not known, one of each `every`."""
        return 0 <= self._step_before < trainer.global_step and every > 0 and trainer.global_step % every == 0

    def misses_end(self, trainer: Trainer) -> bool:
        """Return whether a run resumes at an epoch's end that is not known."""
        return trainer.state.epoch_ended and self._ended_at != trainer.state.total_batches

    def misses_validation(self, trainer: Trainer) -> bool:
        """Return whether a run resumes within an epoch, after a validation that is not known."""
        state = trainer.state
        is_after = state.batch > 0 and not state.epoch_ended and state.validated_at == state.total_batches
        return is_after and self._validations != state.validations
