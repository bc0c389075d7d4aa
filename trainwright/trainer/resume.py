"""Resume: the run's own state into a checkpoint and back; model, optimizers and precision are the engine's."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.callbacks.base import Callback
from trainwright.checkpoint.contents import encode_state, extra_states
from trainwright.checkpoint.editing import Edit
from trainwright.checkpoint.foreign_formats import is_plain
from trainwright.checkpoint.reader import Checkpoint
from trainwright.checkpoint.shards import check_storable
from trainwright.data.datamodule import DataModule
from trainwright.data.loader_state import LoaderState
from trainwright.data.seeding import isolate_rng, rng_state
from trainwright.engine.engine import OpenCheckpoint
from trainwright.engine.gradients import held_gradients, hold_gradients
from trainwright.engine.named_state import model_pieces
from trainwright.errors import CheckpointError
from trainwright.hyperparameters import HyperParameters, stored_hyper_parameters
from trainwright.module import Module, is_overridden
from trainwright.plain_forms import LEFT_OUT
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.base import UNSAVED_KEYS
from trainwright.strategies.optimizer_proxy import unwrap_optimizer
from trainwright.strategies.sparse_gradients import sparse_weights
from trainwright.strategies.state_entries import computed_entries
from trainwright.strategies.state_probe import state_of_a_step
from trainwright.trainer.metrics import merged
from trainwright.trainer.state import OpenEpoch

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer

SAVE_HOOK = "on_save_checkpoint"


def check_save(trainer: Trainer, weights_only: bool) -> bool:
    """Return whether a save can hold the weights only; RuntimeError where there is nothing to save."""
    if not trainer.engine.modules:
        raise RuntimeError("there is nothing to save: save_checkpoint works from fit's beginning on.")
    if not weights_only and trainer.engine.num_workers:
        rank_zero_warn(
            "the optimizers have ended with the processes that the run was handed over to: save_checkpoint writes the "
            "weights alone, from which no fit goes on; ModelCheckpoint saves all, within the run.",
            stacklevel=3,
        )
        weights_only = True
    if not weights_only and trainer.stage != "fit" and not trainer.engine.optimizers:
        raise RuntimeError(
            "the latest run was an evaluation, which has no optimizer to save; pass weights_only=True, or save after fit."
        )
    return weights_only


def run_state(trainer: Trainer, data: LoaderState | None) -> dict[str, Any]:
    """Return what a checkpoint holds beside tensors: counters, schedulers, callbacks, data module and hyper-parameters.

    `data` is the position in the training data; None where the checkpoint holds the weights only.
    """
    from trainwright import __version__

    module, datamodule = trainer.module, trainer.datamodule
    state: dict[str, Any] = {"trainwright_version": __version__}
    state |= _hyper_parameters(module, "", "module") if module is not None else {}
    if datamodule is not None:
        state |= _hyper_parameters(datamodule, "datamodule_", "datamodule")
        if is_overridden("state_dict", datamodule, DataModule):
            state["datamodule"] = datamodule.state_dict()
    if data is None:
        return state
    epoch = trainer.state.open_epoch
    saving = trainer.callbacks if epoch is None else [each for each in trainer.callbacks if each.runs_last]
    return {
        **state,
        "position": {**trainer.state.state_dict(), "places": data["places"]},
        "metrics": trainer.logbook.state_dict() if epoch is None else epoch.metrics,
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "callbacks": {**(epoch.callbacks if epoch is not None else {}), **callback_states(saving)},
        "loggers": trainer.logbook.logger_states() if epoch is None else epoch.loggers,
    }


def position_in_data(trainer: Trainer) -> LoaderState:
    """Return the position in the training data of the present or the latest fit."""
    assert trainer.train_data is not None
    return trainer.train_data.state_dict()


def callback_states(callbacks: Iterable[Callback]) -> dict[str, Any]:
    """Return the state of each callback that has any, by its key."""
    return {each.state_key: state for each in callbacks if (state := each.state_dict())}


def check_state(trainer: Trainer) -> None:
    """Refuse, before anything is trained, state that no checkpoint can hold, where checkpoints are to be written. Collective.

    Raises:
        CheckpointError: on every rank alike; the text says where it stands and of what kind it is.
    """
    engine = trainer.engine
    if trainer.fast_dev_run or not any(each.keeps_any for each in trainer.checkpoint_callbacks):
        return

    sparse = {id(weight) for _, _, weight in sparse_weights(engine.modules)}
    stepped = [unwrap_optimizer(each) for each in engine.optimizers]
    others = [each for each in stepped if _makes_own_state(each) or _steps_any(each, sparse)]

    def look() -> None:
        for optimizer in engine.optimizers:
            for group in optimizer.param_groups:
                stored = {key: value for key, value in group.items() if key not in UNSAVED_KEYS}
                encode_state(stored, f"a parameter group of {type(optimizer).__name__}")
        for optimizer in others:
            for key, tensor in state_of_a_step(optimizer, sparse):
                _check_dense(optimizer, key, tensor)
                check_storable(f"{key} of {type(optimizer).__name__}", tensor)
        try:
            state = {
                **run_state(trainer, position_in_data(trainer)),
                "extra": [extra_states(module) for module in engine.modules],
            }
        except Exception:  # what tells it may not be ready before the first batch; the save says what is wrong
            return
        encode_state(state, "state")
        for module in engine.modules:
            computed_entries(engine.strategy, module)
        # A hook may yet change what is no tensor that a checkpoint can hold.
        for piece in (
            model_pieces(engine.strategy, engine.modules) if edit_with_hooks(trainer, SAVE_HOOK) is None else ()
        ):
            check_storable(piece.name, piece.tensor)

    for optimizer in others:
        _check_first_step(optimizer)
    subject = "checkpoints of this run could not be written"
    engine.ranks.run_on_all(look, "the start of fit", subject=subject)


def _check_dense(optimizer: Optimizer, key: str, tensor: Tensor) -> None:
    """Refuse sparse state, with the optimizers that keep none (CheckpointError)."""
    if tensor.layout is torch.sparse_coo:
        raise CheckpointError(
            f"tensor '{key} of {type(optimizer).__name__}' is sparse, as the gradients of a layer with sparse=True are; a "
            "checkpoint stores dense tensors. Use torch.optim.SparseAdam, or SGD without momentum, or leave sparse out."
        )


def _steps_any(optimizer: Optimizer, parameters: Collection[int]) -> bool:
    """Return whether an optimizer steps any of the parameters, given by their ids."""
    return bool(parameters) and any(
        id(each) in parameters for group in optimizer.param_groups for each in group["params"]
    )


def _makes_own_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is none of torch's or DeepSpeed's own, whose state is plain tensors, and steps by itself."""
    is_known = type(optimizer).__module__.startswith(("torch.optim", "deepspeed.ops."))
    return not is_known and hasattr(optimizer, "_optimizer_step_post_hooks")


def _check_first_step(optimizer: Optimizer) -> None:
    """Have the state that an optimizer makes in its first step looked at there, once: no checkpoint may be able to hold it."""

    def look(stepped: Optimizer, *_: Any) -> None:
        handle.remove()
        for state in stepped.state.values():
            for key, value in state.items() if isinstance(state, dict) else ():
                local = value._local_tensor if isinstance(value, DTensor) else value
                if isinstance(local, Tensor):
                    check_storable(f"{key} of {type(stepped).__name__}", local)

    handle = optimizer.register_step_post_hook(look)


def save_run(trainer: Trainer, path: str, weights_only: bool, blocking: bool, overwrite: bool) -> None:
    """Write a checkpoint of the run as it stands; see Trainer.save_checkpoint. Collective: call on every rank."""
    trainer.state.saves += 1
    data = None if weights_only else position_in_data(trainer)
    trainer.engine.save(
        path,
        step=trainer.state.step,
        epoch=trainer.state.epoch,
        state=run_state(trainer, data),
        rank_state=None if data is None else rank_state(trainer, data),
        weights_only=weights_only,
        number=trainer.state.saves,
        edit=edit_with_hooks(trainer, SAVE_HOOK),
        blocking=blocking,
        overwrite=overwrite,
    )


def rank_state(trainer: Trainer, data: LoaderState) -> dict[str, Any]:
    """Return what a checkpoint holds of this rank alone: within an epoch, what was logged in it and where its data stands."""
    assert trainer.module is not None
    own_stop = trainer.should_stop and not any(each._has_asked_to_stop for each in trainer.callbacks)
    epoch = trainer.state.open_epoch
    return {
        "rng": epoch.generators if epoch is not None else trainer.state.loaded_generators or rng_state(),
        "metrics": epoch.unfinished if epoch is not None else trainer.logbook.epoch_state(),
        "sources": [data["sources"]],
        "epoch_rng": None if trainer.state.epoch_ended else trainer.state.epoch_generators,
        "should_stop": own_stop,
        "gradients": held_gradients(trainer.engine.modules) if trainer.state.holds_gradients else [],
    }


def open_epoch(trainer: Trainer) -> OpenEpoch:
    """Return what a checkpoint holds of an epoch that the run stops within, where it stands."""
    logbook = trainer.logbook
    callbacks = copy.deepcopy(callback_states(each for each in trainer.callbacks if not each.runs_last))
    return OpenEpoch(
        logbook.state_dict(), trainer.logbook.epoch_state(), logbook.logger_states(), callbacks, rng_state()
    )


def _hyper_parameters(owner: HyperParameters, prefix: str, kind: str) -> dict[str, Any]:
    plain, forms = stored_hyper_parameters(owner, is_plain)
    left_out = [name for name, form in forms.items() if form["form"] == LEFT_OUT]
    if left_out and not owner.__dict__.get("_has_warned_of_hyper_parameters"):
        owner.__dict__["_has_warned_of_hyper_parameters"] = True
        rank_zero_warn(
            f"the hyper-parameters {', '.join(left_out)} of the {kind} have no plain form, so checkpoints and loggers are "
            f"without them, and load_from_checkpoint wants them as arguments. Call save_hyperparameters(ignore={left_out!r}) "
            "where the constructor's defaults are right.",
            stacklevel=2,
        )
    if not plain and not forms:
        return {}
    stored = {f"{prefix}hyper_parameters": plain, f"{prefix}hparams_name": owner._hparams_name}
    return {**stored, f"{prefix}hyper_parameter_forms": forms} if forms else stored


def edit_with_hooks(trainer: Trainer, name: str) -> Edit | None:
    """Return what lets the hooks change a checkpoint's contents; None where nobody overrides them."""
    module = trainer.module
    own = module is not None and is_overridden(name, module, Module)
    if not own and not any(is_overridden(name, each, Callback) for each in trainer.callbacks):
        return None

    def edit(contents: dict[str, Any]) -> None:
        trainer.hooks.call(name, contents)

    return edit


def open_with_hooks(trainer: Trainer, checkpoint: Checkpoint) -> OpenCheckpoint:
    """Read a verified checkpoint and show its contents to on_load_checkpoint, which may still build layers then. Collective."""
    return trainer.engine.open(checkpoint, edit=edit_with_hooks(trainer, "on_load_checkpoint"))


def open_to_resume(trainer: Trainer, checkpoint: Checkpoint) -> OpenCheckpoint:
    """Open a checkpoint and take the state of the parts; what that draws does not shift what the run draws. Collective."""
    with isolate_rng():
        opened = open_with_hooks(trainer, checkpoint)
        restore_parts(trainer, opened)
    return opened


def restore_parts(trainer: Trainer, opened: OpenCheckpoint) -> None:
    """Take the state of the callbacks and of the datamodule, before the optimizers are made and on_fit_start is called.

    So a callback that changes the module or adds parameter groups can do so again there.
    """
    callbacks = opened.state.get("callbacks", {})  # a loop of one's own saves none
    for callback in trainer.callbacks:
        if callback.state_key in callbacks:
            callback.load_state_dict(callbacks[callback.state_key])
    _restore_datamodule(trainer, opened.state)


def restore(trainer: Trainer, opened: OpenCheckpoint) -> dict[str, Any] | None:
    """Take the run's state from a checkpoint, and return this rank's generators, to be set when training begins. Collective.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one of another run.
    """

    def check(state: dict[str, Any]) -> None:
        saved, present = len(state.get("lr_schedulers", [])), len(trainer.lr_scheduler_configs)
        if saved != present and "lr_schedulers" in state:  # a hook may have taken them out
            raise CheckpointError(
                f"{opened.checkpoint.path}: it was saved with {saved} scheduler{'s' * (saved != 1)}, but this run "
                f"has {present}. Build the same schedulers to resume."
            )

    assert trainer.module is not None
    assert trainer.train_data is not None
    restored = trainer.engine.load(opened, strict=trainer.module.strict_loading is not False, check=check)
    state = restored.state
    trainer.state.load_state_dict(state["position"])
    sources = restored.nearest_rank_state.get("sources") or [()]
    trainer.train_data.load_state_dict({"places": state["position"].get("places", ()), "sources": sources[0]})
    own = restored.rank_state or {}
    trainer.state.epoch_generators = own.get("epoch_rng")
    if own.get("should_stop"):
        _stay_stopped(trainer, opened.checkpoint.path)
    if trainer.state.holds_gradients:
        _take_gradients(trainer, opened.checkpoint, own.get("gradients", []))
    schedulers = state.get("lr_schedulers", [])  # as many as in this run, unless a hook has taken them out
    for config, saved in zip(trainer.lr_scheduler_configs, schedulers, strict=False):
        config.scheduler.load_state_dict(saved)
        optimizer = getattr(config.scheduler, "optimizer", None)
        if trainer.state.step and optimizer is not None:  # it has stepped before this process, which torch may ask for
            optimizer._opt_called = True
    trainer.logbook.load_state_dict(state.get("metrics", {}))
    if trainer.state.batch:
        trainer.logbook.unfinished = _unfinished_metrics(trainer, opened.checkpoint, restored.rank_state)
    trainer.resume_source = opened.checkpoint.path
    last = trainer.settings.last_epoch
    if last is not None and trainer.state.epoch >= last and trainer.state.batch == 0:
        trainer.print(
            f"{opened.checkpoint.path} stands at the end of epoch {trainer.state.epoch - 1}, and max_epochs is {last}: nothing "
            "is left to train."
        )
    else:
        trainer.print(
            f"going on from {opened.checkpoint.path}: epoch {trainer.state.epoch}, batch {trainer.state.batch}, step "
            f"{trainer.state.step}"
        )
    trainer.state.loaded_generators = restored.rng
    return restored.rng


def _stay_stopped(trainer: Trainer, path: str) -> None:
    """Let a run stay stopped that the user's own code had stopped: nobody may ask again where it goes on."""
    trainer.should_stop = True
    trainer.print(
        f"trainer.should_stop had been set when {path} was saved, so the run ends as it would have ended; to train on, set "
        "trainer.should_stop = False in on_train_start."
    )


def _take_gradients(trainer: Trainer, checkpoint: Checkpoint, held: Sequence[Mapping[str, Tensor]]) -> None:
    """Take back the gradients that wait for a step of manual optimization, in a job like the one that saved them."""
    strategy = trainer.engine.strategy
    if checkpoint.header.get("strategy") == strategy.name and len(held) == len(trainer.engine.modules):
        hold_gradients(trainer.engine.modules, held)
        return
    trainer.state.holds_gradients = False
    rank_zero_warn(
        f"{checkpoint.path} holds gradients that wait for a step, as {checkpoint.world_size} processes under "
        f"{checkpoint.header.get('strategy')!r} had them; on {trainer.world_size} under {strategy.name!r} the run goes on "
        "without them.",
        stacklevel=2,
    )


def _unfinished_metrics(trainer: Trainer, checkpoint: Checkpoint, own: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what was logged in the epoch before: this rank's own, or at another world size what is dealt to it."""
    assert trainer.module is not None
    if checkpoint.world_size == trainer.world_size:
        return (own or {}).get("metrics")
    dealt = range(trainer.global_rank, checkpoint.world_size, trainer.world_size)
    states = [(checkpoint.rank_state(rank) or {}).get("metrics") for rank in dealt]
    together, left_out = merged([each for each in states if each], trainer.module)
    if left_out:
        rank_zero_warn(
            f"{checkpoint.path} was saved within an epoch on {checkpoint.world_size} processes, and this run has "
            f"{trainer.world_size}: the metrics {', '.join(left_out)} do not say how the states of several ranks become one, "
            "so their values for that epoch are those of the rest of it.",
            stacklevel=2,
        )
    return together


def restore_weights(trainer: Trainer, opened: OpenCheckpoint) -> None:
    """Take a module's weights, and the datamodule's state, from a checkpoint. Collective.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one of another model.
    """
    assert trainer.module is not None
    strict = trainer.module.strict_loading is not False
    restored = trainer.engine.load(opened, weights_only=True, strict=strict)
    _restore_datamodule(trainer, restored.state)


def _restore_datamodule(trainer: Trainer, state: dict[str, Any]) -> None:
    if trainer.datamodule is not None and "datamodule" in state:
        trainer.datamodule.load_state_dict(state["datamodule"])
