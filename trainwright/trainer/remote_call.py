"""A call of the Trainer in processes that are started for it, and the results that come back.

If the call starts the job's processes (in a notebook, with ddp_spawn), the Trainer here takes no part in the run. A Trainer
with the same arguments makes the call on every rank, with copies of the callbacks, loggers, module and data. The results:

    the module's state_dict, by a checkpoint without optimizers, into the module itself (and its other buffers)
    the counters, the metrics, the result
    the state_dict of the callbacks
    attributes of the callbacks, the loggers, the profiler, the module and the datamodule: plain data, tensors and RESULTS

Optimizers, schedulers, loaders, RNG states and other attributes do not come back.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.callbacks.base import Callback
from trainwright.callbacks.classification_report import ClassificationScores
from trainwright.callbacks.learning_rate_search import LearningRateSearch
from trainwright.checkpoint.codec import encode
from trainwright.engine.worker_calls import call_in_workers
from trainwright.errors import CheckpointError
from trainwright.hyperparameters import AttributeDict
from trainwright.module import Module, is_overridden
from trainwright.profilers.simple import Duration
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.run import Run

WEIGHTS = "weights"
OWN_ARGUMENTS = ("callbacks", "logger", "profiler")
"""Arguments of a Trainer that the parts made of them replace."""
RESULTS = (LearningRateSearch, ClassificationScores, Duration, AttributeDict)
"""Classes whose objects come back part by part."""
RESULT = "trainwright result"
"""The key of the class's number."""
NOT_OURS = frozenset({*vars(nn.Module()), "_trainer", "_toggled", "trainer", "_running_module"})
"""Attributes of modules and callbacks that are torch's, or of the run."""
ENGINES_OWN = ("ds_", "_ds_", "_fsdp", "_external_params", "_original_parameters", "applied_pre_backward")
"""How the names of attributes begin that the strategies' engines leave on a module."""


def call_remotely(
    run: Run, function: Callable[..., Any], arguments: dict[str, Any], others: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Make a call in the workers of a new job, load its changes into `run`, and return its result.

    `function` makes the call on a rank and returns `changes`. It gets the folder, `arguments` as "Trainer", `others`, the parts
    of the run and `options`.

    Raises:
        TypeError: something that cannot be copied to other processes.
        WorkerFailed: a rank has failed. Nothing has changed here.
        RunStopped: a signal has stopped the run there. Nothing has changed here.
        LaunchError: the job could not be started.
    """
    handed = {
        "model": run.module,
        **options,
        "datamodule": run.datamodule,
        "callbacks": run.callbacks,
        "loggers": run.loggers,
        "profiler": run.profiler,
        "Trainer": {name: value for name, value in arguments.items() if name not in OWN_ARGUMENTS},
        "others": others,
    }
    with tempfile.TemporaryDirectory(prefix="trainwright-", ignore_cleanup_errors=True) as name:
        folder, num_workers = Path(name), run.engine.num_workers
        changed = call_in_workers(function, handed, num_workers, asked=f"trainer.{run.call}", folder=folder)
        _load_changes(run, changed)
        if changed["has_weights"]:
            _load_weights(run, str(folder / WEIGHTS), changed["buffers"])
    return changed["result"]


def _load_weights(run: Run, path: str, buffers: dict[str, Any]) -> None:
    """Load the workers' weights into the module.

    Raises:
        RuntimeError: they have other layers.
    """
    engine, module = run.engine, run.module
    assert module is not None
    engine.precision.convert_module(module)
    if is_overridden("configure_model", module, Module):
        with engine.precision.init_context():
            module.configure_model()
    # A module without values got its memory in the workers only.
    if any(each.is_meta for each in (*module.parameters(), *module.buffers())):
        module.to_empty(device=engine.device)
        engine.precision.convert_module(module)
    try:
        engine.load(path, weights_only=True)
    except CheckpointError as error:
        raise RuntimeError(
            f"trainer.{run.call} has finished, but its weights do not fit the {type(module).__name__} here: {error} "
            "Make every layer in __init__ or in configure_model: setup() and other hooks are called in the workers only."
        ) from error
    with torch.no_grad():
        for name, value in module.named_buffers():
            if name in buffers and value.shape == buffers[name].shape:
                value.copy_(buffers[name])


def _load_changes(run: Run, changed: dict[str, Any]) -> None:
    """Load the workers' report of the run into this process's objects."""
    module = run.module
    assert module is not None
    # The optimizers ended with the workers.
    run.engine.modules, run.engine.optimizers = [module], []
    module.trainer = run.trainer
    run.load_changes(changed["run"])
    for callback, state in zip(run.callbacks, changed["callback_states"], strict=False):
        if state:
            callback.load_state_dict(state)
    for owner, attributes in zip(
        [module, run.datamodule, *run.loggers, run.profiler], changed["attributes"], strict=True
    ):
        _set_attributes(owner, attributes)
    if vars(run.profiler).keys() - changed["attributes"][-1].keys():
        rank_zero_warn(
            f"the measurements of {type(run.profiler).__name__} stay in the processes of trainer.{run.call}: read its output, "
            "which they have printed, or written to a file if the profiler has a dirpath or a filename."
        )
    for callback, attributes in zip(run.callbacks, changed["callback_attributes"], strict=False):
        _set_attributes(callback, attributes)


def changes(run: Run, result: Any, folder: Path) -> dict[str, Any]:
    """Return a worker's report of its run, and save the weights in the folder. Collective."""
    module = run.module
    assert module is not None
    # Other calls do not change the weights.
    has_weights = run.call == "fit" or run.ckpt_path is not None
    if has_weights:
        run.engine.save(str(folder / WEIGHTS), step=0, epoch=0, state={}, weights_only=True)
    # Buffers with persistent=False are in no checkpoint, so they come back by themselves.
    kept = module.state_dict(keep_vars=True)
    return {
        "result": result,
        "has_weights": has_weights,
        "buffers": {name: value for name, value in module.named_buffers() if name not in kept},
        "run": run.changes(),
        "callback_states": [_plain_state(each) for each in run.callbacks],
        "callback_attributes": [_plain_attributes(each) for each in run.callbacks],
        "attributes": [_plain_attributes(each) for each in (module, run.datamodule, *run.loggers, run.profiler)],
    }


def _plain_state(callback: Callback) -> dict[str, Any]:
    state = callback.state_dict()
    encode(state, f"the state_dict of {type(callback).__name__}")  # raises the error that a checkpoint would raise
    return state


def _plain_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object that are plain data, tensors and results."""
    state = owner.__getstate__() if isinstance(owner, Callback) else vars(owner) if owner is not None else {}
    return _plain_items(
        {key: value for key, value in state.items() if key not in NOT_OURS and not key.startswith(ENGINES_OWN)}
    )


def _plain_items(items: Mapping[str, Any]) -> dict[str, Any]:
    plain = {}
    for name, value in items.items():
        with suppress(TypeError):
            plain[name] = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    """Return plain data and tensors unchanged, and a result as a dict. TypeError for anything else."""
    if type(value) in RESULTS:
        parts = value if isinstance(value, dict) else vars(value)
        value = {RESULT: RESULTS.index(type(value)), **_plain_items(parts)}
    elif isinstance(value, array):
        value = list(value)
    elif type(value) is dict:
        value = {key: _plain(each) for key, each in value.items()}
    encode(value)
    return value


def _set_attributes(owner: Any, attributes: dict[str, Any]) -> None:
    own = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})  # without a datamodule None
    own.update({name: _merged(own.get(name), value) for name, value in attributes.items() if name != RESULT})


def _merged(own: Any, value: Any) -> Any:
    """Return a value from a worker. Lists, dicts and results change in place, since other objects may refer to them."""
    if type(value) is dict and RESULT in value:
        kind: Any = RESULTS[value[RESULT]]
        own = own if type(own) is kind else kind.__new__(kind)
        _set_attributes(own, value)
        return own
    if type(value) is dict:
        value = {key: _merged(None, each) for key, each in value.items()}
    if isinstance(own, list) and isinstance(value, list):
        own[:] = value
    elif isinstance(own, dict) and isinstance(value, dict):
        own.clear()
        own.update(value)
    else:
        return value
    return own
