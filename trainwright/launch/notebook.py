"""Worker calls of a process whose command cannot be run again: a notebook, a REPL, a test runner.

The workers are fresh interpreters, because a fork could not use a device that is in use here. cloudpickle copies their work.
"""

from __future__ import annotations

import gc
import inspect
import json
import linecache
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle
import torch

from trainwright.distributed.failures import flush_streams
from trainwright.distributed.signals import STOP_SIGNALS
from trainwright.errors import RunStopped, WorkerFailed
from trainwright.launch.nodes import Job, JobOutcome
from trainwright.launch.processes import job_settings, run_machine
from trainwright.launch.supervisor import ENTRY, Supervisor, catch_signals

WORK, RESULT = "work", "result"
ADVICE = (
    "cloudpickle has to copy it, so no open files, locks, connections or generators. Make it where it is used (in setup(), in "
    "a hook, at the first __getitem__), or leave it out in __getstate__; a plain script needs no copy."
)


def run_in_workers(
    function: Callable[..., Any],
    named: dict[str, Any],
    num_processes: int,
    *,
    folder: Path,
    asked: str,
    defaults: dict[str, str] | None = None,
) -> Any:
    """Run `function(folder, **named)` in every worker of a new job. Return rank 0's result, plain data and tensors.

    The folder is empty, and for this job only. Errors name the call as `asked`, and its arguments as in `named`. `defaults` are
    the precision and the accelerator, for settings that the function leaves open.
    """
    # Only this process has the source of a notebook's cells, which comes from no file and so has no time of a change.
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    pack(folder / WORK, {**named, "the function": function, "the cells": cells}, asked)
    (folder / "search_path.json").write_text(json.dumps([sys.path, sys.argv], default=str), encoding="utf-8")
    command = [sys.executable, ENTRY, "worker", str(folder)]
    outcome = _run_here(Job(command, num_processes, **job_settings(), defaults=defaults or {}))
    if outcome.reason:
        rank = outcome.reason.split()[1]  # rank 1 of 2 failed first
        error = folder / f"error-{rank}"
        trace = error.read_text(encoding="utf-8") if error.exists() else "Its output is above."
        raise WorkerFailed(f"{asked}: {outcome.reason}; the job was ended.\n\nOn rank {rank}:\n{trace}")
    if outcome.code != 0:
        raise RunStopped(outcome.code)
    if not (folder / RESULT).exists():
        raise WorkerFailed(f"{asked}: a worker exited before its work was done. Do not call sys.exit() in it.")
    return torch.load(folder / RESULT, map_location="cpu", weights_only=True)


def _run_here(job: Job) -> JobOutcome:
    """Run a job from this process (KeyboardInterrupt after a Ctrl-C)."""
    flush_streams()
    supervisor = Supervisor(job)
    is_main = threading.current_thread() is threading.main_thread()  # only it may install handlers
    previous = catch_signals(supervisor.on_signal, *STOP_SIGNALS) if is_main else {}
    try:
        # NOTE: the kernel kills the ranks when the *thread* that started them ends. That is this one, which waits for them.
        outcome = run_machine(job, supervisor)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    print(outcome.rest, end="", file=sys.stderr, flush=True)
    if supervisor.signal == signal.SIGINT:
        raise KeyboardInterrupt
    return outcome


def work(folder: str) -> None:
    """Do the work in a worker, and write rank 0's result."""
    path, rank = Path(folder), os.environ["RANK"]
    try:
        named = torch.load(path / WORK, map_location="cpu", weights_only=False)  # written by the caller
        linecache.cache.update(named.pop("the cells"))
        for kind in gc.get_objects():  # loader workers pickle instances of the caller's classes by name
            if issubclass(type(kind), type) and kind.__module__ == "__main__" and "." not in kind.__qualname__:
                setattr(sys.modules["__main__"], kind.__name__, kind)
        (path / f"taken-{rank}").touch()
        if len(list(path.glob("taken-*"))) == int(os.environ["WORLD_SIZE"]):
            (path / WORK).unlink(missing_ok=True)  # may be large, and would stay if this process were killed
        result = named.pop("the function")(path, **named)
        if rank == "0":
            torch.save(result, path / RESULT)
    except Exception:
        (path / f"error-{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        raise


def pack(path: Path, work: dict[str, Any], asked: str) -> None:
    """Write work to a file (TypeError with the place of a part that cannot be copied)."""
    try:
        _write(path, work)
    except Exception as error:
        if (culprit := _find_culprit(work)) is None:  # the disk may be full
            raise
        raise TypeError(f"{asked} runs in new processes, and {culprit}. {ADVICE}") from error


def _write(path: str | Path, value: Any) -> None:
    torch.save(value, path, pickle_module=cloudpickle, pickle_protocol=5)


def _find_culprit(named: Mapping[str, Any], depth: int = 5) -> str | None:
    """Return the path to a part that cannot be copied, and the reason, or None if all can."""
    for name, value in named.items():
        try:
            _write(os.devnull, value)
        except Exception as error:  # whatever an object's __reduce__ or __getstate__ raises
            inner = {name + place: part for place, part in _parts(value).items()} if depth else {}
            reason = str(error).rstrip(".") or type(error).__name__
            text = f"{name} ({type(value).__name__}) cannot be copied to them: {reason}"
            return _find_culprit(inner, depth - 1) or text
    return None


def _parts(value: Any) -> dict[str, Any]:
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        return {f"[{key!r}]": part for key, part in value.items()}
    if isinstance(value, FunctionType):
        closure = inspect.getclosurevars(value)
        return {f", its variable {name!r}": part for name, part in {**closure.nonlocals, **closure.globals}.items()}
    has_state = bool(getattr(value, "__dict__", None)) and not isinstance(value, type)
    state = value.__getstate__() if has_state else None
    attributes = dict(state) if isinstance(state, Mapping) else {}
    attributes |= attributes.pop("_modules", {})
    # Public names first: the user knows them, and private ones of torch often lead to the same object.
    return {f".{name}": attributes[name] for name in sorted(attributes, key=lambda name: name.startswith("_"))}
