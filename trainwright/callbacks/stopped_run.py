"""A stopped run: the checkpoint of a run that a signal has stopped, or an exception, for ModelCheckpoint."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from trainwright.callbacks.checkpoint_name import SUFFIX
from trainwright.callbacks.checkpoint_place import is_taken, remove_replaced
from trainwright.checkpoint.store import open_checkpoint
from trainwright.data.seeding import isolate_rng, set_rng_state
from trainwright.errors import CheckpointError

if TYPE_CHECKING:
    from trainwright.callbacks.model_checkpoint import ModelCheckpoint
    from trainwright.trainer.trainer import Trainer


def save_stopped_run(callback: ModelCheckpoint, trainer: Trainer, name: str) -> str:
    """Save the run whole, unless a whole checkpoint of this very position is there; return the path. Collective.

    Weights that are not finite are not saved; the path is empty then.
    """
    try:
        callback._conclude(trainer)  # of a save that is still on its way
    except CheckpointError as error:  # alike on every rank; this save may do better, and says it where it does not
        if trainer.is_global_zero:
            print(f"trainwright: {error}", file=sys.stderr, flush=True)
    path, is_there = trainer.engine.ranks.decide(lambda: _plan(callback, trainer, name), "the save of a run that ends")
    if is_there:
        return str(path)
    if callback._weights.refuses(trainer, callback.last_model_path):
        return ""
    before = callback.last_model_path, callback._place, callback._replaced
    if before[0] and before[0] not in callback.best_k_models:
        callback._replaced = [*callback._replaced, before[0]]
    callback.last_model_path = callback._place = path  # what is saved knows of itself
    try:
        trainer.save_checkpoint(path)
    except BaseException:
        callback.last_model_path, callback._place, callback._replaced = before
        raise
    callback._replaced = remove_replaced(callback._replaced, path, trainer)
    return str(path)


def _plan(callback: ModelCheckpoint, trainer: Trainer, name: str) -> tuple[str, bool]:
    """Return where the run is saved, and whether it is already. Rank 0's."""
    for path in (callback.last_model_path, trainer.resume_source or ""):
        if path and _holds_position(path, trainer):
            return path, True
    # Shorter than the names of epochs' ends, so that of the same step these count as newer.
    return _free(f"{callback.dirpath}/{name}-step={trainer.global_step}"), False


def _holds_position(path: str, trainer: Trainer) -> bool:
    """Return whether a checkpoint is one that this run would go on from as from where it stands now."""
    try:
        saved: dict[str, Any] | None = open_checkpoint(path, "off").run_state().get("position")
    except CheckpointError:
        return False
    if saved is None:
        return False  # the weights alone
    return trainer.state.is_where(saved)


def save_failed_run(callback: ModelCheckpoint, trainer: Trainer) -> None:
    """Save a run that an exception has ended, where it can be resumed exactly, and say so; see `save_on_exception`."""
    try:
        refusal = trainer.state.progress.obstacle or trainer.engine.finiteness.fault()
        if refusal:
            print(f"save_on_exception: nothing is saved: {refusal}.", file=sys.stderr)
            return
        stem = f"{callback.dirpath}/exception-epoch={trainer.current_epoch}-step={trainer.global_step}"
        path = _free(stem)
        with isolate_rng():
            if callback._generators:
                set_rng_state(callback._generators)  # a resumed run makes the whole validation
            trainer.save_checkpoint(path, callback.save_weights_only)
        print(f"save_on_exception: the run was saved as {path}", file=sys.stderr)
    except Exception as error:  # the first exception is what has to be seen
        print(f"save_on_exception: the save failed: {type(error).__name__}: {error}", file=sys.stderr)


def _free(stem: str) -> str:
    """Return the path with that stem, or the first with a version, at which nothing is, a damaged checkpoint neither."""
    path, number = f"{stem}{SUFFIX}", 1
    while is_taken(path):
        path, number = f"{stem}-v{number}{SUFFIX}", number + 1
    return path
