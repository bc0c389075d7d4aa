"""Saving: the state of a run in a checkpoint. The engine saves the model, the optimizers and the precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from trainwright.callbacks.base import Callback
from trainwright.checkpoint.contents import MODEL, encode_state, with_parts
from trainwright.checkpoint.editing import Edit
from trainwright.checkpoint.foreign_formats import is_plain
from trainwright.checkpoint.library_models import write_pieces
from trainwright.checkpoint.shards import check_storable
from trainwright.checkpoint.weight_files import EXPORT, ExportSettings, export_settings
from trainwright.data.datamodule import DataModule
from trainwright.data.loader_state import LoaderState
from trainwright.data.seeding import rng_state
from trainwright.data.transfer import map_leaves
from trainwright.devices.hardware import using
from trainwright.engine.named_state import computed_keys, held_gradients, model_pieces
from trainwright.hyperparameters import HyperParameters, hyper_parameter_entries
from trainwright.module import Module, is_overridden
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.run import Run
from trainwright.trainer.run_position import CHECKPOINT, EPOCH_LEFT, EPOCH_START, OpenEpoch
from trainwright.trainer.training_run import TrainingRun

SAVE_HOOK = "on_save_checkpoint"


def check_save(run: Run, weights_only: bool) -> bool:
    """Return whether a save can only contain weights. RuntimeError if there is nothing to save."""
    if not run.engine.modules:
        raise RuntimeError("there is nothing to save: save_checkpoint works from fit's beginning on.")
    if not weights_only and run.engine.num_workers:
        rank_zero_warn(
            "the optimizers ended with the processes of the run, so save_checkpoint writes the weights only, from which no fit "
            "resumes. A ModelCheckpoint saves everything, within the run.",
            stacklevel=4,
        )
        weights_only = True
    if not weights_only and run.call != "fit" and not run.engine.optimizers:
        raise RuntimeError("an evaluation has no optimizer to save. Pass weights_only=True, or save after fit.")
    return weights_only


def run_state(run: Run, data: LoaderState | None) -> dict[str, Any]:
    """Return the state of counters, schedulers, callbacks, datamodule and hyper-parameters for a checkpoint.

    `data` is the position in the training data. None for a checkpoint of the weights only.
    """
    from trainwright import __version__

    module, datamodule = run.module, run.datamodule
    state: dict[str, Any] = {"trainwright_version": __version__}
    state |= _hyper_parameters(module, "", "module") if module is not None else {}
    if datamodule is not None:
        state |= _hyper_parameters(datamodule, "datamodule_", "datamodule")
        if is_overridden("state_dict", datamodule, DataModule):
            state["datamodule"] = datamodule.state_dict()
    if data is None:
        return state
    epoch = run.state.open_epoch
    copied = None if epoch is None else epoch.callbacks
    own = callback_states(run.trainer.callbacks if copied is None else run.trainer.checkpoint_callbacks)
    return {
        **state,
        "position": {**run.state.state_dict(), "places": data["places"]},
        "metrics": run.logbook.state_dict() if epoch is None else epoch.metrics,
        "lr_schedulers": [config.scheduler.state_dict() for config in run.trained.schedulers],
        "callbacks": {**(copied or {}), **own},
        "loggers": run.logbook.logger_states() if epoch is None else epoch.loggers,
    }


def callback_states(callbacks: Iterable[Callback]) -> dict[str, Any]:
    """Return the state of each callback that has any, by its key."""
    return {each.state_key: state for each in callbacks if (state := each.state_dict())}


def check_state(run: TrainingRun) -> None:
    """Refuse, before anything is trained, state that checkpoints cannot hold (CheckpointError on every rank). Collective."""
    engine = run.engine
    if run.settings.fast_dev_run or not any(each.keeps_any for each in run.trainer.checkpoint_callbacks):
        return

    def look() -> None:
        try:
            state = run_state(run, run.data.state_dict())
        except Exception:  # a state_dict may not be ready before the first batch, and the save will report the error
            return
        encode_state(state, "state")
        for module in engine.modules:
            computed_keys(engine.strategy, module)
        # on_save_checkpoint may still replace tensors that a checkpoint cannot hold.
        for piece in model_pieces(engine.strategy, engine.modules) if edit_with_hooks(run, SAVE_HOOK) is None else ():
            check_storable(piece.name, piece.tensor)

    subject = "checkpoints of this run could not be written"
    engine.ranks.run_on_all(look, "the start of fit", subject=subject)


def save_checkpoint(
    run: Run, path: str, *, weights_only: bool, blocking: bool, export: str | None, **options: bool
) -> bool:
    """Write a checkpoint as Trainer.save_checkpoint does. Return False if it waits until the run may be saved. Collective."""
    settings = None if export is None else export_settings(export)
    if settings and not blocking:
        raise ValueError(f"export={export!r} writes within the call. Leave out blocking=False.")
    options |= {"weights_only": check_save(run, weights_only), "blocking": blocking}
    return run.save(options["weights_only"], partial(_write, run, path, settings, **options))


def export_weights(run: Run, path: str, settings: ExportSettings) -> bool:
    """Write files as Trainer.export does. Return False if that waits until a window ends. Collective."""
    if not run.engine.modules:
        raise RuntimeError("there is nothing to export: export works from fit's beginning on.")

    def write() -> None:
        if not _export(run, path, settings, _parts(run)) and settings.format == "huggingface":
            run.trainer.print(f"{path} has no tokenizer: save it there, or make it an attribute of the module.")

    return run.save(True, write)


def _export(
    run: Run, path: str, settings: ExportSettings, parts: Mapping[str, Mapping[str, Tensor]], is_staged: bool = False
) -> bool:
    """Write the scored weights, and return whether there is a tokenizer. Collective."""
    engine, owners = run.engine, () if run.datamodule is None else (run.datamodule,)
    with using(engine.device):
        engine.strategy.check_gradients(partial(engine.ranks.exchange, call=EXPORT))
        pieces = with_parts(model_pieces(engine.strategy, engine.modules), parts)[MODEL]
        return write_pieces(path, engine.modules[0], pieces, settings, engine.ranks, owners, is_staged)


def _parts(run: Run) -> dict[str, Mapping[str, Tensor]]:
    """Return the tensors that callbacks store instead of the model's, or beside them. Collective."""
    parts: dict[str, Mapping[str, Tensor]] = {}
    for sections in run.hooks.call("sharded_state_dict"):
        parts |= sections or {}
    return parts


def _write(
    run: Run, path: str, export: ExportSettings | None, *, weights_only: bool, overwrite: bool, **options: bool
) -> None:
    """Write a checkpoint of the run's present state. Collective."""
    if run.logbook.is_row_due:
        run.logbook.log_step()  # no resumed run would write it
    number = run.state.count_save()  # before the state is read, because the checkpoint contains its number
    data = None if weights_only or run.trained.data is None else run.trained.data.state_dict()
    state, own = run_state(run, data), None if data is None else rank_state(run, data)
    parts = _parts(run)
    run.logbook.note_checkpoint(path)
    with nullcontext() if export is None else run.engine.writer.staged(path, overwrite) as directory:
        if export is not None:
            _export(run, f"{directory}/{export.format}", export, parts, is_staged=True)
        run.engine.save(
            path,
            step=run.state.step,
            epoch=run.state.epoch,
            state=state,
            rank_state=own,
            weights_only=weights_only,
            number=number,
            edit=edit_with_hooks(run, SAVE_HOOK),
            overwrite=overwrite,
            directory=directory,
            parts=parts,
            **options,
        )


def rank_state(run: Run, data: LoaderState) -> dict[str, Any]:
    """Return this rank's part of a checkpoint, such as the values logged in the epoch and the state of data sources."""
    assert run.module is not None
    # A callback that has stopped the run stops a resumed one again by itself.
    own_stop = run.stop.requested and not any(run.hooks.call("has_requested_stop"))
    epoch = run.state.open_epoch
    return {
        "rng": run.state.rng.get(EPOCH_LEFT) or run.state.rng.get(CHECKPOINT) or rng_state(),
        "metrics": epoch.unfinished if epoch is not None else run.logbook.epoch_state(),
        "sources": [data["sources"]],
        "epoch_rng": None if run.state.epoch_ended else run.state.rng.get(EPOCH_START),
        "should_stop": own_stop,
        "gradients": held_gradients(run.engine.modules) if run.state.holds_gradients else [],
    }


def open_epoch(run: Run) -> OpenEpoch:
    """Return the state after the latest batch, for checkpoints of a run that stops within the epoch."""
    logbook, callbacks = run.logbook, None
    if any(
        each.keeps_any for each in run.trainer.checkpoint_callbacks
    ):  # whose states can be stored, so they can be copied
        states = callback_states(each for each in run.trainer.callbacks if each not in run.trainer.checkpoint_callbacks)
        callbacks = map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, states)
    return OpenEpoch(logbook.state_dict(), logbook.epoch_state(), logbook.logger_states(), callbacks)


def _hyper_parameters(owner: HyperParameters, prefix: str, kind: str) -> dict[str, Any]:
    stored, left_out = hyper_parameter_entries(owner, prefix, is_plain)
    if left_out:
        rank_zero_warn(
            f"the {kind}'s hyper-parameters without a plain form ({', '.join(left_out)}) are left out of checkpoints and "
            f"loggers, and load_from_checkpoint needs them as arguments. Call save_hyperparameters(ignore={left_out!r}) "
            "if the constructor's defaults are right.",
            stacklevel=2,
        )
    return stored


def edit_with_hooks(run: Run, name: str) -> Edit | None:
    """Return a function that runs the checkpoint hooks, or None if none is overridden."""
    module = run.module
    own = module is not None and is_overridden(name, module, Module)
    if not own and not any(is_overridden(name, each, Callback) for each in run.trainer.callbacks):
        return None

    def edit(contents: dict[str, Any]) -> None:
        run.hooks.call(name, contents)

    return edit
