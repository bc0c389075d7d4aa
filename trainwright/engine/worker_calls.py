"""Calls in worker processes that are started for them; a Trainer's are in trainer/remote_call.py."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint.codec import decode, encode
from trainwright.data.seeding import rng_state, set_rng_state
from trainwright.distributed.environment import JOB_VARIABLE, Environment, announced


def call_in_workers(
    function: Callable[..., Any],
    named: dict[str, Any],
    num_processes: int,
    *,
    asked: str,
    folder: Path,
    defaults: dict[str, str] | None = None,
) -> Any:
    """Run `function(folder, **named)` on every rank of a new job, and return rank 0's result, plain data and tensors.

    The workers start with this process's generators, default dtype and matmul precision. `defaults` are `run_in_workers`'.

    Raises:
        TypeError: an argument cannot be copied there, or a result cannot be returned.
        WorkerFailed, LaunchError: a rank has failed, or the job could not be started.
    """
    from trainwright.launch.notebook import run_in_workers

    settings = {
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "seed": torch.initial_seed(),
        "rng": {**rng_state(), "device": None},  # every worker computes on its device
    }
    arguments = {**named, "the called function": function, "settings": settings, "asked": asked}
    result = run_in_workers(_begin, arguments, num_processes, folder=folder, asked=asked, defaults=defaults)
    return None if result is None else decode(*result)


def call_in_job(
    function: Callable[..., Any], args: Sequence[Any], num_processes: int, *, asked: str, defaults: dict[str, str]
) -> Any:
    """Run `function(*args)` on every rank of a new job, and return rank 0's result; a single rank is this process.

    Errors name the call as `asked`. `defaults` are the precision and the accelerator, by the Engine's names, for settings that
    the function does not choose.

    Raises:
        TypeError: something cannot be copied to the processes or back.
        WorkerFailed, LaunchError: a rank has failed, or the processes could not be started, as in a worker of a job.
    """
    from trainwright.launch.command import check_worker_calls

    if num_processes > 1 or Environment.detect().launched_by != "single":
        check_worker_calls(asked)
    if num_processes == 1:
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        with announced(**{**ranks, JOB_VARIABLE: json.dumps(defaults)} if defaults else {}):
            return function(*args)
    with tempfile.TemporaryDirectory(prefix="trainwright-", ignore_cleanup_errors=True) as folder:
        named = {"function": function, "args": tuple(args)}
        return call_in_workers(_call, named, num_processes, asked=asked, folder=Path(folder), defaults=defaults)


def _call(folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def _begin(folder: Path, settings: dict[str, Any], asked: str, **named: Any) -> Any:
    """Restore the calling process's settings in a worker, run the function, and return the encoded result on rank 0."""
    function = named.pop("the called function")
    torch.set_default_dtype(settings["dtype"])
    torch.set_float32_matmul_precision(settings["matmul"])
    torch.manual_seed(settings["seed"])  # for the generators of all devices
    set_rng_state(settings["rng"])
    result = function(folder, **named)
    if Environment.detect().rank != 0:
        return None
    try:
        return encode(result, "the result")
    except TypeError as error:
        raise TypeError(f"{asked}: {error} Return these, or write the rest to a file.") from error
