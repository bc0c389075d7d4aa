"""Calls in worker processes that are started for them, and `notebook_launcher`; a Trainer's are in trainer/remote_call.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint.codec import decode, encode
from trainwright.data.seeding import rng_state, set_rng_state
from trainwright.devices import accelerator
from trainwright.devices.abilities import num_together
from trainwright.distributed.environment import Environment
from trainwright.strategies import SPAWNING, Strategy


def start_job(num_processes: int, num_nodes: int, strategy: str | Strategy, can_call_workers: bool) -> int:
    """Replace this process with the launcher, or return how many workers each call starts; LaunchError if it can do neither."""
    from trainwright.launch.command import calls_workers, check_worker_calls
    from trainwright.launch.processes import launch

    reason = f"devices={num_processes}"
    spawns = isinstance(strategy, str) and strategy in SPAWNING
    if can_call_workers and num_nodes == 1 and (spawns or calls_workers()):  # workers are on this machine only
        check_worker_calls(reason)
        return num_processes
    launch(num_processes, num_nodes=num_nodes, reason=reason)


def call_in_workers(
    function: Callable[..., Any], named: dict[str, Any], num_processes: int, *, asked: str, folder: Path
) -> Any:
    """Run `function(folder, **named)` on every rank of a new job, and return rank 0's result: plain data and tensors.

    The workers start with this process's generators, default dtype and matmul precision.

    Raises:
        TypeError: an argument that cannot be copied there, or a result that cannot be returned.
        WorkerFailed, LaunchError: a rank has failed, or the job could not be started.
    """
    from trainwright.launch.notebook import run_in_workers

    settings = {
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "seed": torch.initial_seed(),
        "rng": {**rng_state(), "device": None},  # each worker computes on its own device
    }
    given = {**named, "the called function": function, "settings": settings, "asked": asked}
    plain, tensors = run_in_workers(_begin, given, num_processes, folder=folder, asked=asked)
    return decode(plain, tensors)


def notebook_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int | None = None) -> Any:
    """Run `function(*args)` in each of several new processes, and return its result on rank 0.

    For a notebook, a REPL or a test. The function creates an `Accelerator`, which joins the job. The function and its
    arguments are copied to the new processes; changes to the copies stay there.

    Args:
        function: returns plain data and tensors, or None.
        args: its arguments.
        num_processes: by default one per GPU, or one without GPUs. A single one is this process.

    Raises:
        TypeError: something cannot be copied to the processes or back.
        WorkerFailed, LaunchError: a rank has failed, or the processes could not be started.
    """
    if not callable(function):
        raise TypeError(
            f"notebook_launcher was given a {type(function).__name__}; accepted is a function, with its arguments in args=."
        )
    if num_processes is None:
        num_processes = num_together(accelerator.built_for() or "cpu") or 1
    if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
        raise ValueError(
            f"num_processes={num_processes!r} is not accepted; pass a whole number from 1, or None for one for each GPU."
        )
    from trainwright.launch.command import check_worker_calls

    environment = Environment.detect()
    if environment.launched_by != "single":
        raise RuntimeError(
            f"notebook_launcher was called in a worker of a job of {environment.world_size} processes, which cannot start "
            "another job; call the function directly there."
        )
    if num_processes == 1:
        return function(*args)
    asked = f"notebook_launcher(num_processes={num_processes})"
    check_worker_calls(asked)
    with tempfile.TemporaryDirectory(prefix="trainwright-", ignore_cleanup_errors=True) as folder:
        named = {"function": function, "args": tuple(args)}
        return call_in_workers(_call, named, num_processes, asked=asked, folder=Path(folder))


def _call(folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def _begin(folder: Path, settings: dict[str, Any], asked: str, **named: Any) -> Any:
    """Restore the calling process's settings in a worker, run the function, and return the encoded result on rank 0."""
    function = named.pop("the called function")
    torch.set_default_dtype(settings["dtype"])
    torch.set_float32_matmul_precision(settings["matmul"])
    torch.manual_seed(settings["seed"])  # of every device's generator
    set_rng_state(settings["rng"])
    result = function(folder, **named)
    if Environment.detect().rank != 0:
        return None
    try:
        return encode(result, "the result")
    except TypeError as error:
        raise TypeError(f"{asked}: {error} Return these, or write the rest to a file.") from error
