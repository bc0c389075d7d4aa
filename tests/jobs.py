"""Starts a real job of several gloo ranks for a test and returns the results of the ranks.

A test module defines a function that takes the job's folder and returns plain data and tensors. `run_job` calls it on
every rank, with warnings as errors. The ranks are forked (see forked.py), or started by our launcher on an accelerator.
Start a job once and make all its checks on the result.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forked import run_python, run_ranks
from interpreters import run_command
from small import ON_HOST


def run_job(
    function: Callable[[Path], Any], ranks: int, folder: Path, *, seconds: float = 180.0, warnings_are: str = "error"
) -> list[Any]:
    """Run a module-level function on every rank of a job and return the results by rank.

    `warnings_are` applies to interpreters, and forked ranks have the test's filters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if ON_HOST and not torch.accelerator.is_available():
        place = (function.__code__.co_filename, function.__name__, str(folder))
        run_ranks(call_on_rank, place, ranks, folder, seconds)
    else:
        _launch(function, ranks, folder, seconds, warnings_are)
    return [torch.load(folder / f"result-{rank}.pt") for rank in range(ranks)]


def _launch(function: Callable[[Path], Any], ranks: int, folder: Path, seconds: float, warnings_are: str) -> None:
    command = [
        sys.executable, "-W", warnings_are, __file__, function.__code__.co_filename, function.__name__, str(folder),
    ]  # fmt: skip
    launcher = [sys.executable, "-m", "trainwright.launch.processes", f'{{"num_processes": {ranks}}}']
    done = run_command([*launcher, *command], folder=folder, seconds=seconds)
    assert done.returncode == 0, f"the job ended with {done.returncode}\n{done.stdout}\n{done.stderr}"


def run_alone(script: str, folder: Path, *, seconds: float = 120.0) -> None:
    """Run lines of Python in one separate process, with warnings as errors, beside the jobs of the strategies' tests."""
    places = [str(Path(__file__).parent / "strategies"), str(Path(__file__).parent)]
    program = f"import sys\nsys.path[:0] = {places!r}\n{script}"
    if ON_HOST and not torch.accelerator.is_available():
        done = run_python("-c", program, folder=folder, seconds=seconds)
    else:
        command = [sys.executable, "-W", "error", "-c", program]
        done = run_command(command, folder=folder, seconds=seconds)
    assert done.returncode == 0, done.stderr


def call_on_rank(path: str, name: str, folder: str) -> None:
    """Call the function of a file on this rank, and store its result."""
    sys.path.append(str(Path(path).parent))  # of the job's neighbours
    spec = importlib.util.spec_from_file_location("job_module", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["job_module"] = module
    spec.loader.exec_module(module)
    result = getattr(module, name)(Path(folder))
    torch.save(result, Path(folder) / f"result-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    call_on_rank(*sys.argv[1:])
