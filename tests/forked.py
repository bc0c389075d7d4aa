"""Ranks of a test's job, and programs, forked from a server process that has torch and the package loaded.

An interpreter that imports them takes seconds of a core, and a job is two or three of those beside its launcher. Tests of
launchers, signals and exits start real interpreters instead, and so do tests of the order of collectives: forked ranks share
the seed of their hashes, so sets have the same order on all of them.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy
import torch
from deadlines import deadline
from torch.distributed import TCPStore

PRELOADED = ("preloaded", "forked", "jobs")
LEAVE_SECONDS = 60.0
"""How long the other ranks have to leave by themselves, once one has failed."""
_LOADED_IN = os.getpid()
"""The process that imported this file: in a rank it has to be the server."""
_PR_SET_PDEATHSIG = 1
_METHOD = "fork"
"""How Linux's interpreters start processes, up to Python 3.13."""


def run_ranks(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    ranks: int,
    folder: Path,
    seconds: float,
    passed_on: Mapping[str, Any] | None = None,
) -> None:
    """Call a function on every rank of a job, in a separate process, with the test's filters of warnings.

    `passed_on` has the settings that `trainwright launch` passes to its workers, such as a strategy.

    Raises:
        AssertionError: a rank failed, or the job missed its deadline. It has the output of all ranks.
    """
    limit = deadline(seconds)  # before the ranks start, since they inherit the measurement
    context = _server()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as printed:
        processes = []
        for rank in range(ranks):
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            job = {
                "TRAINWRIGHT_JOB": json.dumps(passed_on or {}),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": store.port,
            }
            more = {**places, **job, "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
            variables = {**os.environ, **{name: str(value) for name, value in more.items()}}
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


def run_python(
    *arguments: object,
    folder: Path | str | None = None,
    variables: Mapping[str, str] | None = None,
    seconds: float = 120.0,
    warnings_are: str | None = "error",
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` (-c CODE, -m MODULE or a script), in a separate process group.

    Raises:
        subprocess.TimeoutExpired: it missed its deadline, and was killed.
    """
    limit = deadline(seconds)
    given = [str(each) for each in arguments]
    settings = ({**os.environ, **(variables or {})}, os.fspath(folder or os.getcwd()))
    with tempfile.TemporaryDirectory() as printed:
        outputs = [Path(printed, name) for name in ("stdout", "stderr")]
        places = [str(each) for each in outputs]
        process = _server().Process(target=_run_program, args=(*settings, places, warnings_are, given), daemon=False)
        process.start()
        try:
            process.join(limit)
        finally:
            is_over = process.exitcode is not None
            process.kill()
            process.join()
        texts = [each.read_text() if each.exists() else "" for each in outputs]
    command = ["python", *given]
    if not is_over:
        raise subprocess.TimeoutExpired(command, limit, *texts)
    return subprocess.CompletedProcess(command, process.exitcode, *texts)


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    # Python 3.11 does not hand the server this process's path, and the server skips a module that it cannot find.
    path = os.pathsep.join([str(Path(__file__).parent), *(each for each in sys.path if each)])
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}):
        multiprocessing.forkserver.ensure_running()
    return context


def _wait(processes: list[ForkServerProcess], seconds: float) -> str:
    """Wait for the ranks. Return the errors, or an empty text."""
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
    _become_an_interpreter(variables, folder, [output, output])
    warnings.filters[:] = filters  # type: ignore[index] # the test's own: errors, and what pyproject.toml excepts
    warnings._filters_mutated()  # type: ignore[attr-defined]
    sys.warnoptions[:] = ["error"]
    torch.set_num_threads(1)
    _run_to_the_end(function, arguments)


def _run_program(variables: Any, folder: str, outputs: list[str], warnings_are: Any, arguments: list[str]) -> None:
    os.setsid()
    _become_an_interpreter(variables, folder, outputs)
    if warnings_are is not None:
        warnings.simplefilter(warnings_are)  # type: ignore[arg-type]
        sys.warnoptions[:] = [warnings_are]
    sys.path[:0] = [each for each in variables.get("PYTHONPATH", "").split(os.pathsep) if each]
    _run_to_the_end(interpret, (arguments,))


def interpret(arguments: list[str]) -> None:
    """Execute arguments as an interpreter without options does."""
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        code = compile(arguments[1], "<string>", "exec")
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        main.__file__ = os.path.abspath(arguments[0])
        code = compile(Path(arguments[0]).read_text(), main.__file__, "exec")
    exec(code, vars(main))


def _become_an_interpreter(variables: dict[str, str], folder: str, outputs: list[str]) -> None:
    """Make this process look like a new interpreter to a program, except for the seed of its hashes."""
    assert os.getpid() != _LOADED_IN, f"the server of forked processes has not loaded {PRELOADED}"
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # with the server, which ends with the tests
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for number, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    random.seed()
    numpy.random.seed()
    torch.seed()
    multiprocessing.set_start_method(_METHOD, force=True)  # a child of the server would start loader workers by it, too


def _run_to_the_end(function: Callable[..., Any], arguments: tuple[Any, ...]) -> NoReturn:
    """Call a function and end the process as an interpreter does after it."""
    code = 1
    try:
        function(*arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
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
