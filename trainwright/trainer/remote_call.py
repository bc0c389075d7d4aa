"""A call of the Trainer in processes that are started for it, and the results that come back.

If the call starts the job's processes (in a notebook, with ddp_spawn), the Trainer here takes no part in the run. A Trainer
with the same arguments makes the call on every rank, with copies of the callbacks, loggers, module and data. The results are
the module's weights and buffers, the counters, the metrics, the state_dict of the callbacks, plain attributes of callbacks
and loggers, and the value that the call returns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from trainwright.callbacks.base import Callback
from trainwright.checkpoint.codec import encode
from trainwright.engine.worker_calls import call_in_workers
from trainwright.errors import CheckpointError
from trainwright.module import Module, is_overridden
from trainwright.trainer.run import Run

WEIGHTS = "weights"
OWN_ARGUMENTS = ("callbacks", "logger", "profiler")
"""Arguments of a Trainer that the parts made of them replace."""


def call_remotely(
    trainer: Any,
    run: Run,
    function: Callable[..., Any],
    arguments: dict[str, Any],
    others: Any,
    options: dict[str, Any],
) -> Any:
    """Make a call in the workers of a new job, load its changes into `run`, and return its result.

    `function` makes the call on a rank and returns `changes`. It gets the folder, `arguments` as "Trainer", `others`, the parts
    of the trainer and `options`.

    Raises:
        TypeError: something that cannot be copied to other processes.
        WorkerFailed: a rank has failed. Nothing has changed here.
        RunStopped: a signal has stopped the run there. Nothing has changed here.
        LaunchError: the job could not be started.
    """
    handed = {"model": run.module, **options, "datamodule": run.datamodule, "others": others}
    handed |= {name: getattr(trainer, name) for name in ("callbacks", "loggers", "profiler")}
    handed["Trainer"] = {name: value for name, value in arguments.items() if name not in OWN_ARGUMENTS}
    with tempfile.TemporaryDirectory(prefix="trainwright-", ignore_cleanup_errors=True) as name:
        folder, num_workers = Path(name), run.engine.num_workers
        changed = call_in_workers(function, handed, num_workers, asked=f"trainer.{run.call}", folder=folder)
        _load_changes(trainer, run, changed)
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
    engine.precision.restore_module(module)
    with torch.no_grad():
        for name, value in module.named_buffers():
            if name in buffers and value.shape == buffers[name].shape:
                value.copy_(buffers[name])


def _load_changes(trainer: Any, run: Run, changed: dict[str, Any]) -> None:
    """Load the workers' report of the run into this process's objects."""
    module = run.module
    assert module is not None
    # The optimizers ended with the workers.
    run.engine.modules, run.engine.optimizers = [module], []
    module.trainer = trainer
    run.load_changes(changed["run"])
    for callback, state in zip(trainer.callbacks, changed["callback_states"], strict=False):
        if state:
            callback.load_state_dict(state)
    for part, attributes in zip([*trainer.loggers, *trainer.callbacks], changed["attributes"], strict=False):
        vars(part).update(attributes)


def changes(trainer: Any, result: Any, folder: Path) -> dict[str, Any]:
    """Return a worker's report of its latest run, and save the weights in the folder. Collective."""
    run: Run = trainer.run
    module = run.module
    assert module is not None
    # Other calls do not change the weights.
    has_weights = run.call == "fit" or trainer.ckpt_path is not None
    if has_weights:
        run.engine.save(str(folder / WEIGHTS), step=0, epoch=0, state={}, weights_only=True)
    # Buffers with persistent=False are in no checkpoint, so they come back by themselves.
    kept = module.state_dict(keep_vars=True)
    return {
        "result": result,
        "has_weights": has_weights,
        "buffers": {name: value for name, value in module.named_buffers() if name not in kept},
        "run": trainer.run.changes(),
        "callback_states": [_plain_state(each) for each in trainer.callbacks],
        "attributes": [_plain_attributes(part) for part in (*trainer.loggers, *trainer.callbacks)],
    }


def _plain_state(callback: Callback) -> dict[str, Any]:
    state = callback.state_dict()
    encode(state, f"the state_dict of {type(callback).__name__}")  # raises the error that a checkpoint would raise
    return state


def _plain_attributes(part: object) -> dict[str, Any]:
    """Return the attributes of a logger or a callback that are plain data or tensors."""
    plain = {}
    for name, value in vars(part).items():
        with suppress(TypeError):
            encode(value)
            plain[name] = value
    return plain
