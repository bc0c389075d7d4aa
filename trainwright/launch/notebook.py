"""Worker calls of a process whose command cannot be run again: a notebook, a REPL, a test runner.

The workers are fresh interpreters, because a fork could not use a device that is in use here.
"""

from __future__ import annotations

import gc
import json
import linecache
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.distributed.failures import flush_streams
from trainwright.distributed.signals import STOP_SIGNALS, STOPPED_EXIT_CODE
from trainwright.errors import LaunchError, RunStopped, WorkerFailed
from trainwright.launch.packing import pack, read_result, unpack, write_result
from trainwright.launch.processes import launcher_command
from trainwright.launch.supervisor import ENTRY

WORK, RESULT, REPORT = "work", "result", "report"


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
    pack(folder / WORK, {**named, "the function": function, "the cells": cells, "defaults": defaults or {}}, asked)
    search_path = {"path": sys.path, "argv": sys.argv}
    (folder / "search_path.json").write_text(json.dumps(search_path, default=str), encoding="utf-8")
    command = [sys.executable, ENTRY, "worker", str(folder)]
    code = run_launcher(launcher_command(num_processes, command, report=str(folder / REPORT)))
    if code != 0 or not (folder / RESULT).exists():
        raise _failure(folder, code, asked)
    return read_result(folder / RESULT)


def _failure(folder: Path, code: int, asked: str) -> BaseException:
    """Return the error of a job without a result."""
    report = folder / REPORT
    if code == 0:
        return WorkerFailed(f"{asked}: a worker exited before its work was done. Do not call sys.exit() in it.")
    if report.exists():  # a failed rank counts more than a signal that came after it
        text = report.read_text(encoding="utf-8")
        rank = text.split()[1]  # rank 1 of 2 failed first
        error = folder / f"error-{rank}"
        trace = error.read_text(encoding="utf-8") if error.exists() else "Its output is above."
        return WorkerFailed(f"{asked}: {text}\n\nOn rank {rank}:\n{trace}")
    if code >= STOPPED_EXIT_CODE:  # or 128 + the signal's number
        return RunStopped(code)
    return LaunchError(f"{asked}: the launcher of its workers ended with exit code {code}. Its output is above.")


def work(folder: str) -> None:
    """Do the work in a worker, and write rank 0's result."""
    path, rank = Path(folder), os.environ["RANK"]
    try:
        named = unpack(path / WORK)
        linecache.cache.update(named.pop("the cells"))
        job = json.loads(os.environ[JOB_VARIABLE]) | named.pop("defaults")
        os.environ[JOB_VARIABLE] = json.dumps(job)
        for kind in gc.get_objects():  # loader workers pickle instances of the caller's classes by name
            if issubclass(type(kind), type) and kind.__module__ == "__main__" and "." not in kind.__qualname__:
                setattr(sys.modules["__main__"], kind.__name__, kind)
        (path / f"taken-{rank}").touch()
        if len(list(path.glob("taken-*"))) == job["num_processes"]:
            (path / WORK).unlink(missing_ok=True)  # may be large, and would stay if this process were killed
        result = named.pop("the function")(path, **named)
        if rank == "0":
            write_result(path / RESULT, result)
    except Exception:
        (path / f"error-{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        raise


def run_launcher(command: list[str]) -> int:
    """Run the launcher as a child, pass signals on, and return its exit code (KeyboardInterrupt if it ends after a Ctrl-C)."""
    passed: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and number in passed:  # the second Ctrl-C
            raise KeyboardInterrupt
        passed.append(number)
        process.send_signal(number)

    flush_streams()
    # NOTE: the kernel kills the child when the *thread* that started it ends. That is this one, which waits for it.
    with subprocess.Popen(
        [sys.executable, "-I", "-S", ENTRY, "attached", str(os.getpid()), *command],
        bufsize=0,  # no line stays where select does not see it
        stdin=subprocess.DEVNULL,  # this process may be reading its program from there
        # A notebook or a test has replaced the streams.
        stdout=None if sys.stdout is sys.__stdout__ else subprocess.PIPE,
        stderr=None if sys.stderr is sys.__stderr__ else subprocess.PIPE,
        start_new_session=True,  # so that a Ctrl-C in the terminal reaches this process only, which passes it on
    ) as process:
        is_main = threading.current_thread() is threading.main_thread()  # only it may install handlers
        handled = [number for number in STOP_SIGNALS if is_main and signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, pass_on) for number in handled}
        try:
            _print_lines(process)
            process.wait()
        finally:
            process.kill()  # if it still runs; the kernel ends its workers with it
            for number, handler in previous.items():
                signal.signal(number, handler)
    if signal.SIGINT in passed:
        raise KeyboardInterrupt
    return process.returncode


def _print_lines(process: subprocess.Popen[bytes]) -> None:
    """Print the launcher's lines to the replaced streams."""
    streams = {pipe: stream for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)) if pipe}
    while streams:
        for pipe in select.select(list(streams), [], [])[0]:
            if line := pipe.readline():
                print(line.decode(errors="replace"), end="", file=streams[pipe], flush=True)
            else:
                del streams[pipe]
