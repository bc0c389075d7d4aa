"""Runs one case for golden_traces.py and writes its trace: a line per call of a Trainer or loop, and one for the files.

The case is one of a fuzz kind or of the compatibility cases. A trace contains no path, time or host name, and does not
depend on how a checkpoint is divided into files.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import importlib
import inspect
import json
import os
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import driver
import numpy
import torch
from fuzz import peer
from fuzz.kind import Config, Refused, processes
from fuzz.raw_loop import Loop
from fuzz.record import leaves

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint

assert Path(tw.__file__).parents[1] == Path(os.environ["TRACED_TREE"]), f"the package traced is {tw.__file__}"
for kind in os.environ["TRACED_KINDS"].split():  # imported before the worker forks for a case
    driver.cases() if kind == "cases" else importlib.import_module(f"fuzz.{kind}")

LIMIT = 240.0
"""Seconds in which a case must end."""
HOOK = re.compile(
    r"on_\w+|setup|teardown|prepare_data|backward|optimizer_zero_grad|transfer_batch_to_device|configure_\w+"
    r"|[a-z]\w*_step|[a-z]\w*_dataloader"
)
MEASURED = re.compile(r"percent|seconds|per_sec|memory")
"""Columns of rows that measure the machine."""
LIBRARIES = ("trainwright", "torch", "torchmetrics")
current: Trace | None = None


class Witness(tw.Callback):
    """A callback that overrides every hook, so that all of them appear in the trace."""


for name in dir(tw.Callback):
    if name.startswith("on_") or name in ("setup", "teardown"):
        setattr(Witness, name, lambda self, *_, **__: None)


class Trace:
    """The trace of the case that this process runs."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.path = Path(config["parts"], f"{processes()}-{os.environ.get('RANK', '0')}")
        self.folder, self.has_witness = str(folder), config["witness"]
        self.calls: list[tuple[Any, list[str]]] = []
        """The Trainer, or None, and the hooks of the calls that have not ended. A hook may call a Trainer again."""

    def write(self, **line: Any) -> None:
        """Append a line. A forked run appends to the same file, so the trace also has the runs of the kind cuts."""
        with self.path.open("a") as file:
            file.write(json.dumps(self.exact(line)) + "\n")

    def exact(self, value: Any) -> Any:
        """Return a value as JSON, with floats to the last bit, digests of tensors, and no path of this case."""
        if isinstance(value, torch.Tensor) and value.numel() != 1 and value.layout is torch.strided:
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
        if isinstance(value, torch.Tensor):
            return repr(value.item()) if value.numel() == 1 else self.exact(value.to_dense())
        if isinstance(value, Mapping):
            return {self.exact(str(key)): self.exact(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.exact(each) for each in value]
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, float):
            return repr(float(value))
        if isinstance(value, numpy.ndarray):
            return self.exact(value.tolist())
        return str(value).replace(self.folder, "FOLDER") if isinstance(value, (str, Path)) else type(value).__name__

    def digest(self, value: Any, depth: int = 0) -> Any:
        """Return a digest of a value. A dict has a digest per item to this depth. A Timer's state is a time."""
        if depth and isinstance(value, Mapping):
            items = ((self.exact(str(key)), each) for key, each in value.items())
            return {key: self.digest(each, depth - 1) for key, each in items if not key.startswith("Timer")}
        return hashlib.sha256(json.dumps(self.exact(value), sort_keys=True).encode()).hexdigest()[:16]

    def end_of(self, trainer: Any) -> dict[str, Any]:
        """Return the state after a call. Weights and optimizers of several processes are in the checkpoints."""
        names = ("global_step", "current_epoch", "callback_metrics", "should_stop")
        found: dict[str, Any] = {name: getattr(trainer, name) for name in names}
        if processes() == 1:
            module = trainer.lightning_module
            found["weights"] = None if module is None else module.state_dict()
            found["optimizers"] = [self.digest(each.state_dict()) for each in trainer.optimizers]
            found["random"] = self.digest([torch.get_rng_state(), random.getstate(), numpy.random.get_state()])
        return found

    def files(self, folder: Path) -> dict[str, Any]:
        """Return the checkpoints below a folder and the rows of its loggers."""
        saved = {str(each.parent): self.checkpoint(each.parent) for each in sorted(folder.rglob("manifest.json"))}
        read = {str(each): csv.DictReader(each.read_text().splitlines()) for each in sorted(folder.rglob("*.csv"))}
        rows = {
            path: [{key: each for key, each in row.items() if not MEASURED.search(str(key))} for row in table]
            for path, table in read.items()
        }
        return {"checkpoints": saved, "rows": rows}

    def checkpoint(self, path: Path) -> dict[str, Any]:
        """Return a checkpoint's loaded tensors, and digests of its loaded states under their names."""
        try:
            stored = open_checkpoint(str(path))
        except Exception as error:
            return {"raised": type(error).__name__}
        states = {"state": stored.run_state(), **{f"rank {n}": stored.rank_state(n) for n in range(stored.world_size)}}
        return {
            "position": [stored.epoch, stored.step, stored.world_size],
            "tensors": {name: stored.read_tensors(name) for name in stored.sections},
            **{name: self.digest(state, 2) for name, state in states.items()},
        }


def watch_call(name: str) -> None:
    """Make a method of the Trainer write a line when it returns or raises."""
    function = getattr(tw.Trainer, name)

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (trace := current) is None:
            return function(self, *args, **kwargs)
        if trace.has_witness and not any(isinstance(each, Witness) for each in self.callbacks):
            self.callbacks.insert(0, Witness())
        for part in (*args, *kwargs.values(), *self.callbacks):
            if isinstance(part, (tw.Module, tw.DataModule, tw.Callback)):
                watch_hooks(type(part))
        trace.calls.append((self, []))
        raised, result = "", None
        try:
            result = function(self, *args, **kwargs)
            return result
        except BaseException as error:
            raised = type(error).__name__
            raise
        finally:
            hooks = trace.calls.pop()[1]
            trace.write(call=name, raised=raised, result=result, hooks=hooks, **trace.end_of(self))

    setattr(tw.Trainer, name, call)


def watch_hooks(part: type) -> None:
    """Record the calls of the hooks that users' classes define. The hooks of the package's classes may move."""
    for owner in part.__mro__:
        if owner.__module__.partition(".")[0] not in LIBRARIES:
            for name, function in list(vars(owner).items()):
                if inspect.isfunction(function) and HOOK.fullmatch(name) and not hasattr(function, "is_watched"):
                    watch_function(owner, name)


def watch_function(owner: type, name: str) -> None:
    """Record the calls of a function: its name, the number of steps, and the losses or outputs of a step."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current is None or not current.calls:
            return function(self, *args, **kwargs)
        (trainer, hooks), at = current.calls[-1], len(current.calls[-1][1])
        hooks.append(f"{type(self).__name__}.{name}" + (f" at step {trainer.global_step}" if trainer else ""))
        result = function(self, *args, **kwargs)
        tensors = leaves([result] if name.endswith("_step") else list(args[:1]) if "backward" in name else [])
        hooks[at] += f" {current.exact(tensors)}" if tensors else ""
        return result

    watched.is_watched = True  # type: ignore[attr-defined]
    setattr(owner, name, watched)


def watched_run(self: Loop) -> bool:
    """Run a loop of the kind raw and write its losses, rates and weights."""
    if current is None:
        return run_loop(self)
    current.calls.append((None, []))
    was_cut, hooks = run_loop(self), current.calls.pop()[1]
    current.write(call="loop", hooks=hooks, rates=self.rates, was_cut=was_cut, weights=current.digest(self.weights()))
    return was_cut


for name in ("fit", "validate", "test", "predict"):
    watch_call(name)
for owner, name in ((tw.Module, "manual_backward"), (tw.Accelerator, "backward")):
    watch_function(owner, name)
run_loop, Loop.run = Loop.run, watched_run  # type: ignore[method-assign]


def differences(config: Config, folder: Path) -> list[str]:
    """Run the case `config["case"]` of the kind `config["traced"]`, and write its trace."""
    global current
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    kind, case = config["traced"], config["case"]
    if kind == "cases":
        with driver.surroundings() as place:
            current = Trace(config, place)
            try:
                current.write(call="case", result=driver.cases()[case](tw, place))
            except BaseException as error:
                current.write(call="case", raised=type(error).__name__)
            current.write(call="files", **current.files(place))
        return []
    current, raised = Trace(config, folder), ""
    try:
        if kind != "peer":
            return list(importlib.import_module(f"fuzz.{kind}").differences(case, folder))
        peer.run(peer.simplified(case), tw, folder)  # without Lightning's side
        return []
    except BaseException as error:
        raised = str(error).partition(":")[0] if isinstance(error, Refused) else type(error).__name__
        raise
    finally:
        if os.environ.get("RANK", "0") == "0":
            current.write(call="files", raised=raised, **current.files(folder))
        current = None
