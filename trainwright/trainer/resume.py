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
        "position": trainer.state.state_dict(),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "callbacks": {key: state for key, state in callbacks.items() if state},
    }


def restore(trainer: Trainer, path: str) -> dict[str, Any] | None:
    """Take the run's state from a checkpoint; return this rank's generators, to be set when training begins. Collective.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one of another run.
    """

    def check(state: dict[str, Any]) -> None:
        saved, present = len(state.get("schedulers", [])), len(trainer.lr_scheduler_configs)
        if saved != present and "position" in state:
            raise CheckpointError(
                f"{path}: it was saved with {saved} schedulers, but this run has {present}. "
                "Build the same schedulers to resume."
            )

    restored = trainer.engine.load(path, check=check)
    state = restored.state
    trainer.state.load_state_dict(state["position"])
    for config, saved in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
        config.scheduler.load_state_dict(saved)
    callbacks = state.get("callbacks", {})  # a loop of one's own saves none
    for callback in trainer.callbacks:
        if callback.state_key in callbacks:
            callback.load_state_dict(callbacks[callback.state_key])
    trainer.resume_source = path
    return restored.rng
