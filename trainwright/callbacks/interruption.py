"""Interruption: whether a run that an exception ends can be resumed exactly from where it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer


def inexactness(trainer: Trainer) -> str:
    """Return why a run cannot be resumed exactly from where it failed; nothing where it can."""
    state, run = trainer.state, trainer.run
    if trainer.world_size > 1:
        return f"it would take all {trainer.world_size} ranks"
    if trainer.is_within_batch or trainer.is_within_window:
        return "the run failed in the middle of a batch, or of an accumulation window"
    if state.epoch_ended or state.batch >= trainer.num_training_batches or (run is not None and run.is_ending_epoch):
        return "the run failed at the end of an epoch"
    if trainer.is_evaluating and state.validated_at == state.total_batches:
        return "the run failed at the end of a validation"
    return ""
