"""Ranks of a test's job, forked from a server process that has torch and the package loaded.

An interpreter that imports them takes seconds of a core, and a job is two or three of those beside its launcher. What is about
launchers, signals or exits starts real interpreters instead.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from deadlines import deadline
from torch.distributed import TCPStore

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.nn.functional",
    "torch.nn.parallel",
    "trainwright",
    "forked",
)
LEAVE_SECONDS = 60.0
"""How long the other ranks have to leave by themselves, once one has failed."""
_PR_SET_PDEATHSIG = 1
_METHOD = "fork"
"""How Linux's interpreters start processes, up to Python 3.13."""


def run_ranks(
    function: Callable[..., Any], arguments: tuple[Any, ...], ranks: int, folder: Path, seconds: float
) -> None:
    """Call a function on each rank of a job, in a process of its own, with the test's filters of warnings.

    Raises:
        AssertionError: a rank failed, or the job missed its deadline; with what each rank printed.
    """
    limit = deadline(seconds)  # before the ranks start, which inherit what it measures
    context = _server()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as printed:
        processes = []
        for rank in range(ranks):
            variables = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TRAINWRIGHT_JOB": "{}",
                "OMP_NUM_THREADS": "1",
            }
            output = str(Path(printed, f"{rank}.txt"))
            settings = (variables, str(folder), output, list(warnings.filters), function, arguments)
            process = context.Process(target=_run_rank, args=settings, daemon=False)
            process.start()
            processes.append(process)
        try:
            reason = _wait(processes, limit)
        finally:
            for each in processes:  # where the test itself was told to end
                each.kill()
        texts = [Path(printed, f"{rank}.txt") for rank in range(ranks)]
        told = "\n".join(f"-- rank {rank}:\n{each.read_text()}" for rank, each in enumerate(texts) if each.exists())
    assert not reason, f"{reason}\n{told}"


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        multiprocessing.forkserver.ensure_running()
    return context


def _wait(processes: list[ForkServerProcess], seconds: float) -> str:
    """Wait for the ranks; return what went wrong, or nothing."""
    end = time.monotonic() + seconds
    has_failed = False
    while running := [each for each in processes if each.exitcode is None]:
        if any(each.exitcode for each in processes) and not has_failed:
            has_failed = True
            end = min(end, time.monotonic() + deadline(LEAVE_SECONDS))
        left = end - time.monotonic()
        if left <= 0:
            for each in running:
                each.kill()
            for each in running:
                each.join()
            codes = [None if each in running else each.exitcode for each in processes]
            return f"the ranks ended with {codes}, where None had not ended after {seconds:.0f} s"
        wait([each.sentinel for each in running], timeout=left)
    codes = [each.exitcode for each in processes]
    return f"the ranks ended with {codes}" if any(codes) else ""


def _run_rank(
    variables: dict[str, str],
    folder: str,
    output: str,
    filters: list[Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Be a rank: like a new interpreter in what a job can see of it, but for the seed of its hashes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # with the server, which ends with the tests
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    warnings.filters[:] = filters  # type: ignore[index] # the test's own: errors, and what pyproject.toml excepts
    warnings._filters_mutated()  # type: ignore[attr-defined]
    sys.warnoptions[:] = ["error"]
    random.seed()
    numpy.random.seed()
    torch.seed()
    torch.set_num_threads(1)
    multiprocessing.set_start_method(_METHOD, force=True)  # a child of the server would start loader workers by it, too
    code = 1
    try:
        function(*arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type] # by which the other ranks hear of it
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        code = code or 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
