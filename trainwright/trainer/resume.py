"""Resume: the run's own state into a checkpoint and back; model, optimizers and precision are the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.errors import CheckpointError

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer


def run_state(trainer: Trainer) -> dict[str, Any]:
    """Return counters, schedulers and callbacks as plain data."""
    callbacks = {each.state_key: each.state_dict() for each in trainer.callbacks}
    return {
        "trainer": trainer.state.state_dict(),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "callbacks": {key: state for key, state in callbacks.items() if state},
    }


def restore(trainer: Trainer, path: str) -> dict[str, Any] | None:
    """Take the run's state from a checkpoint; return this rank's generators, to be set when training begins. Collective.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one of another run.
    """
    restored = trainer.engine.load(path)
    state = restored.state
    schedulers = state.get("schedulers", [])
    if "trainer" not in state or len(schedulers) != len(trainer.lr_scheduler_configs):
        raise CheckpointError(
            f"{path}: it was saved with {len(schedulers)} schedulers, but this run has {len(trainer.lr_scheduler_configs)}. "
            "Build the same schedulers to resume."
            if "trainer" in state
            else f"{path}: it holds no trainer's counters, so no fit can go on from it; load its weights instead."
        )
    trainer.state.load_state_dict(state["trainer"])
    for config, saved in zip(trainer.lr_scheduler_configs, schedulers, strict=True):
        config.scheduler.load_state_dict(saved)
    for callback in trainer.callbacks:
        if callback.state_key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][callback.state_key])
    trainer.resume_source = path
    return restored.rng
