"""A call of the Trainer in processes that are started for it, and what comes back from them.

Where the job's processes are started by the call (a notebook, ddp_spawn), the Trainer here has no part in the run. A Trainer
of the same arguments makes the call on every rank, with copies of the callbacks, loggers, module and data. What comes back:

    the module's state_dict, by a checkpoint without optimizers, into the module itself (and its other buffers)
    the counters, the metrics, the result
    plain attributes and the state_dict of the callbacks, plain attributes of the loggers, of the module and of the datamodule

What does not: optimizers, schedulers, loaders, generators, and attributes that are more than plain data and tensors.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright.callbacks.base import Callback
from trainwright.checkpoint.codec import encode
from trainwright.data.datamodule import DataModule
from trainwright.engine.worker_calls import call_in_workers
from trainwright.errors import CheckpointError
from trainwright.module import Module, is_overridden
from trainwright.trainer.hooks import HookTable
from trainwright.trainer.logbook import Logbook
from trainwright.trainer.stage import Stages
from trainwright.trainer.state import TrainerState

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer

WEIGHTS = "weights"
OWN_ARGUMENTS = ("callbacks", "logger", "profiler")
"""Arguments of a Trainer that are replaced by the parts made of them."""
TRAINER_FIELDS = (
    "should_stop", "accumulate_grad_batches", "ckpt_path", "resume_source",
)  # fmt: skip
NOT_OURS = frozenset({*vars(nn.Module()), "_trainer", "_toggled", "trainer", "_running_module"})
"""Attributes of modules and callbacks that are torch's, or of the run."""
ENGINES_OWN = ("ds_", "_ds_", "_fsdp", "_external_params", "_original_parameters", "applied_pre_backward")
"""How the names of attributes begin that the strategies' engines leave on a module."""


def call_remotely(
    trainer: Trainer, call: str, module: Module, datamodule: DataModule | None, path: str | None, **options: Any
) -> Any:
    """Make a call in the workers of a new job, take over what it has changed, and return what it returned.

    Raises:
        TypeError: something that cannot be copied to other processes.
        WorkerFailed: a rank has failed; nothing is changed here then.
        RunStopped: a signal has stopped the run there; nor then.
        LaunchError: the job could not be started.
    """
    asked, engine = f"trainer.{call}", trainer.engine
    trainer.stop.note_end(None)
    arguments = {name: value for name, value in trainer.given_arguments.items() if name not in OWN_ARGUMENTS}
    handed = {
        "model": module,
        **options,
        "datamodule": datamodule,
        "callbacks": trainer.callbacks,
        "loggers": trainer.loggers,
        "profiler": trainer.profiler,
        "Trainer": arguments,
        "others": (call, path, trainer.callbacks_of_module, trainer.module is module, trainer.state.plain()),
    }
    with tempfile.TemporaryDirectory(prefix="trainwright-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            told = call_in_workers(make_call, handed, engine.num_workers, asked=asked, folder=folder)
        except KeyboardInterrupt as error:
            trainer.stop.note_end(error)
            raise
        _take_over(trainer, module, datamodule, told)
        if told["has_weights"]:
            _take_weights(trainer, call, module, str(folder / WEIGHTS), told["buffers"])
    return told["result"]


def _take_weights(trainer: Trainer, call: str, module: Module, path: str, buffers: dict[str, Any]) -> None:
    """Fill the module with what the workers have made of it.

    Raises:
        RuntimeError: they have other layers.
    """
    engine = trainer.engine
    engine.precision.convert_module(module)
    if is_overridden("configure_model", module, Module):
        with engine.precision.init_context():
            module.configure_model()
    if any(each.is_meta for each in (*module.parameters(), *module.buffers())):
        module.to_empty(device=engine.device)
        engine.precision.convert_module(module)
    try:
        engine.load(path, weights_only=True)
    except CheckpointError as error:
        raise RuntimeError(
            f"trainer.{call} has come to its end, but its weights do not fit the {type(module).__name__} here: {error} "
            "Make every layer in __init__ or in configure_model: setup() and other hooks are called in the workers alone."
        ) from error
    with torch.no_grad():
        for name, value in module.named_buffers():
            if name in buffers and value.shape == buffers[name].shape:
                value.copy_(buffers[name])


def _take_over(trainer: Trainer, module: Module, datamodule: DataModule | None, told: dict[str, Any]) -> None:
    """Take what the workers tell of the run into this process's objects."""
    trainer.engine.modules, trainer.engine.optimizers = [module], []
    trainer.module, trainer.datamodule = module, datamodule
    module.trainer = trainer
    trainer.state = TrainerState.of_plain(told["state"])
    trainer.optimizers, trainer.prepared_optimizers, trainer.lr_scheduler_configs = [], [], []
    for name, value in told["trainer"].items():
        setattr(trainer, name, value)
    trainer.stages = Stages.of_counts(told["batches"])
    trainer.logbook = Logbook(trainer.loggers, trainer.engine, trainer.state)
    trainer.logbook.load_state_dict(told["metrics"])
    trainer.hooks = HookTable(trainer, module, trainer.callbacks)
    for callback, state in zip(trainer.callbacks, told["callback_states"], strict=False):
        if state:
            callback.load_state_dict(state)
    for owner, attributes in zip([module, datamodule, *trainer.loggers], told["attributes"], strict=True):
        _set_attributes(owner, attributes)
    for callback, attributes in zip(trainer.callbacks, told["callback_attributes"], strict=False):
        _set_attributes(callback, attributes)


def make_call(
    folder: Path,
    model: Module,
    datamodule: DataModule | None,
    callbacks: list[Callback],
    loggers: list[Any],
    profiler: Any,
    Trainer: dict[str, Any],
    others: tuple[Any, ...],
    **options: Any,
) -> dict[str, Any]:
    """Make the call on a rank of the job; return what the process that handed it over has to know. Collective."""
    from trainwright.trainer import trainer as home

    call, path, callbacks_of_module, is_known, state = others
    trainer = home.Trainer(**Trainer)
    trainer.callbacks, trainer.loggers, trainer.profiler = callbacks, loggers, profiler
    trainer.callbacks_of_module, trainer.module = callbacks_of_module, model if is_known else None
    trainer.state = TrainerState.of_plain(state)
    result = getattr(trainer, call)(model, datamodule=datamodule, ckpt_path=path, **options)
    has_weights = call == "fit" or path is not None
    if has_weights:
        trainer.engine.save(str(folder / WEIGHTS), step=0, epoch=0, state={}, weights_only=True)
    kept = model.state_dict(keep_vars=True)
    return {
        "result": result,
        "has_weights": has_weights,
        "buffers": {name: value for name, value in model.named_buffers() if name not in kept},
        "state": trainer.state.plain(),
        "batches": trainer.stages.counts(),
        "trainer": {name: getattr(trainer, name) for name in TRAINER_FIELDS},
        "metrics": {
            "callback": trainer.callback_metrics,
            "logged": trainer.logged_metrics,
            "shown": trainer.progress_bar_metrics,
        },
        "callback_states": [_plain_state(each) for each in trainer.callbacks],
        "callback_attributes": [_plain_attributes(each) for each in trainer.callbacks],
        "attributes": [_plain_attributes(each) for each in (model, datamodule, *loggers)],
    }


def _plain_state(callback: Callback) -> dict[str, Any]:
    state = callback.state_dict()
    encode(state, f"the state_dict of {type(callback).__name__}")  # says here what a checkpoint would have refused
    return state


def _plain_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object that are plain data and tensors."""
    state = owner.__getstate__() if isinstance(owner, Callback) else vars(owner) if owner is not None else {}
    plain = {}
    for name, value in state.items():
        try:
            encode(value)
        except TypeError:
            continue
        if name not in NOT_OURS and not name.startswith(ENGINES_OWN):
            plain[name] = value
    return plain


def _set_attributes(owner: Any, attributes: dict[str, Any]) -> None:
    """Set attributes; lists and dicts are changed in place, since others may hold them too."""
    for name, value in attributes.items():
        own = vars(owner).get(name)
        if isinstance(own, list) and isinstance(value, list):
            own[:] = value
        elif isinstance(own, (dict, OrderedDict)) and isinstance(value, dict):
            own.clear()
            own.update(value)
        else:
            vars(owner)[name] = value
