"""Handing work over to processes that are started for it: when that is due, and a loop of one's own as such work.

What a Trainer hands over, and what it takes back, is trainer/handover.py's.
"""

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
from trainwright.strategies import HANDED_OVER, Strategy


def start_job(num_processes: int, num_nodes: int, strategy: str | Strategy, takes_handover: bool) -> int:
    """Replace this process by the launcher; or return how many processes each call has to start, where it hands work over.

    Raises:
        LaunchError: neither can be done here.
    """
    from trainwright.launch.command import check_handover, is_for_handover
    from trainwright.launch.processes import launch

    reason = f"devices={num_processes}"
    is_asked = isinstance(strategy, str) and strategy in HANDED_OVER
    if takes_handover and num_nodes == 1 and (is_asked or is_for_handover()):  # to this machine's processes alone
        check_handover(reason)
        return num_processes
    launch(num_processes, num_nodes=num_nodes, reason=reason)


def call_in_workers(
    function: Callable[..., Any], named: dict[str, Any], num_processes: int, *, asked: str, folder: Path
) -> Any:
    """Run `function(folder, **named)` on every rank of a new job, and return rank 0's result: plain data and tensors.

    The workers begin with the generators and the number formats of this process.

    Raises:
        TypeError: an argument that cannot be copied there, or a result that cannot come back.
        WorkerFailed, LaunchError: a rank has failed, or the job could not be started.
    """
    from trainwright.launch.notebook import run_in_workers

    plain, tensors = run_in_workers(
        _begin,
        {**named, "the called function": function, "settings": _settings(), "asked": asked},
        num_processes,
        folder=folder,
        asked=asked,
    )
    return decode(plain, tensors)


def notebook_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int | None = None) -> Any:
    """Run `function(*args)` in each of several new processes, and return what it returned on rank 0.

    In a notebook, a REPL or a test; the function makes its `Accelerator` itself, which joins the job. The processes are
    fresh ones, to which the function and its arguments are copied; what they change in their copies stays there.

    Args:
        function: returns plain data and tensors, or None.
        args: its arguments.
        num_processes: how many; None is one a GPU, else one. One is this process itself.

    Raises:
        TypeError: what cannot be copied there or back.
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
            f"num_processes={num_processes!r} is not accepted; pass a whole number from 1, or None for one a GPU."
        )
    from trainwright.launch.command import check_handover

    environment = Environment.detect()
    if environment.launched_by != "single":
        raise RuntimeError(
            f"notebook_launcher was called in a worker of a job of {environment.world_size} processes, which can start no "
            "other; call the function itself there."
        )
    if num_processes == 1:
        return function(*args)
    asked = f"notebook_launcher(num_processes={num_processes})"
    check_handover(asked)
    with tempfile.TemporaryDirectory(prefix="trainwright-", ignore_cleanup_errors=True) as folder:
        named = {"function": function, "args": tuple(args)}
        return call_in_workers(_call, named, num_processes, asked=asked, folder=Path(folder))


def _call(folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def _begin(folder: Path, settings: dict[str, Any], asked: str, **named: Any) -> Any:
    """Stand in a worker as the calling process stands, do its work, and return on rank 0 what comes back."""
    function = named.pop("the called function")
    torch.set_default_dtype(settings["dtype"])
    torch.set_float32_matmul_precision(settings["matmul"])
    torch.manual_seed(settings["seed"])  # on each device
    set_rng_state(settings["rng"])
    result = function(folder, **named)
    if Environment.detect().rank != 0:
        return None
    try:
        return encode(result, "the result")
    except TypeError as error:
        raise TypeError(f"{asked}: {error} Return these, or write the rest to a file.") from error


def _settings() -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "seed": torch.initial_seed(),
        "rng": {**rng_state(), "device": None},  # each worker computes on a device of its own
    }
