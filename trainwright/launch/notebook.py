"""Worker calls: run a function in every worker of a new job and return rank 0's result.

For a process whose command cannot be run again: a notebook, a REPL, a test runner. The same launcher as a script's starts
the workers, as fresh interpreters: a fork could not use a device that is in use here.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import linecache
import os
import re
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from trainwright.distributed.environment import JOB_VARIABLE, Environment
from trainwright.distributed.failures import flush_streams, summarize
from trainwright.distributed.signals import STOP_SIGNALS, STOPPED_EXIT_CODE
from trainwright.errors import LaunchError, RunStopped, WorkerFailed
from trainwright.launch.packing import pack, unpack, write_result
from trainwright.launch.processes import launcher_command

ENTRY = str(Path(__file__).with_name("entry.py"))
WORK, SEARCH_PATH, RESULT, REPORT = "work", "search_path.json", "result", "report"


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

    Args:
        named: the arguments, by the names that errors use for them. They are copied to the workers.
        folder: an empty folder for this job only.
        asked: the call that needs the job, for errors.
        defaults: the precision and the accelerator, for settings that the function leaves open.

    Raises:
        TypeError: an argument cannot be copied.
        WorkerFailed, LaunchError, RunStopped: a rank failed, the job could not be started, or a signal stopped it.
    """
    pack(folder / WORK, {**named, "the function": function}, asked)
    found = {"path": list(map(str, sys.path)), "argv": list(map(str, sys.argv)), "defaults": defaults or {}}
    (folder / SEARCH_PATH).write_text(json.dumps(found), encoding="utf-8")
    command = [sys.executable, ENTRY, "worker", str(folder)]
    code = run_launcher(launcher_command(num_processes, command, report=str(folder / REPORT)))
    result = folder / RESULT
    stopped = (STOPPED_EXIT_CODE, *(128 + number for number in STOP_SIGNALS))
    # The launcher reports only a rank that has failed, which counts more than a signal that came after it.
    if code in stopped and not (folder / REPORT).exists():
        raise RunStopped(code)
    if code != 0 or not result.exists():
        raise _failed(folder, code, asked)
    return unpack(result, weights_only=True)


def work(folder: str) -> None:
    """Do the work in a worker, and write rank 0's result."""
    path = Path(folder)
    defaults = json.loads((path / SEARCH_PATH).read_text(encoding="utf-8"))["defaults"]
    os.environ[JOB_VARIABLE] = json.dumps({**json.loads(os.environ[JOB_VARIABLE]), **defaults})
    environment = Environment.detect()
    rank = environment.rank
    try:
        named = unpack(path / WORK)
        (path / f"taken-{rank}").touch()
        if len(list(path.glob("taken-*"))) == environment.local_world_size:
            (path / WORK).unlink(missing_ok=True)  # may be large, and would stay if this process were killed
        result = named.pop("the function")(path, **named)
        if rank == 0:
            write_result(path / RESULT, result)
    except Exception as error:
        carried = {"summary": summarize(error), "traceback": traceback.format_exc()}
        (path / f"error-{rank}").write_text(json.dumps(carried), encoding="utf-8")
        raise


def _failed(folder: Path, code: int, asked: str) -> Exception:
    report = folder / REPORT
    if code == 0:
        return WorkerFailed(f"{asked}: a worker exited before its work was done. Do not call sys.exit() in it.")
    if not report.exists():
        return LaunchError(
            f"{asked}: the launcher of its workers ended with exit code {code} before their work was done. Its output is "
            "above. Run the work as a script to see more."
        )
    text = report.read_text(encoding="utf-8").strip()
    failed = re.search(r"rank (\d+)", text)
    rank = failed[1] if failed else "0"
    if not (error := folder / f"error-{rank}").exists():
        return WorkerFailed(f"{asked}: {text} Any traceback was printed to standard error.")
    carried = json.loads(error.read_text(encoding="utf-8"))
    if "(exit code" in text:  # it failed before or after it was connected to the others
        text = f"{text} ({carried['summary']})"
    return WorkerFailed(f"{asked}: {text}\n\nOn rank {rank}:\n{with_sources(carried['traceback'])}")


def run_launcher(command: list[str]) -> int:
    """Run the launcher as a child, pass signals on, and return its exit code (KeyboardInterrupt if it ends after a Ctrl-C)."""
    # NOTE: the kernel kills the child when the *thread* that started it ends. That is this one, which waits for it.
    flush_streams()
    with subprocess.Popen(
        [sys.executable, "-I", "-S", ENTRY, "attached", str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,  # this process may be reading its program from there
        # A notebook or a test has replaced the streams.
        stdout=None if sys.stdout is sys.__stdout__ else subprocess.PIPE,
        stderr=None if sys.stderr is sys.__stderr__ else subprocess.PIPE,
        start_new_session=True,  # so that a Ctrl-C in the terminal reaches this process only, which passes it on
    ) as process:
        try:
            with _passing_on(process) as passed:
                _relay(process)
                code = process.wait()
        except BaseException:
            process.kill()  # the kernel ends its workers with it
            raise
        if signal.SIGINT in passed:
            raise KeyboardInterrupt
        return code


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass the first signal of every kind on to the launcher, and yield their list. A second Ctrl-C interrupts."""
    passed: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if number not in passed:
            passed.append(number)
            process.send_signal(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    if threading.current_thread() is not threading.main_thread():  # only the main thread may install handlers
        handled = []
    previous = {number: signal.signal(number, pass_on) for number in handled}
    try:
        yield passed
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _relay(process: subprocess.Popen[bytes]) -> None:
    """Print the launcher's output until it has ended and all is printed."""
    streams = {pipe: stream for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)) if pipe}
    decoders = {pipe: codecs.getincrementaldecoder("utf-8")(errors="replace") for pipe in streams}
    while streams:
        has_ended = process.poll() is not None  # before the select, so that nothing printed until then is missed
        ready, _, _ = select.select(list(streams), [], [], 0.1)
        for pipe in ready:
            chunk = os.read(pipe.fileno(), 1 << 16)
            print(decoders[pipe].decode(chunk, final=not chunk), end="", file=streams[pipe], flush=True)
            if not chunk:
                del streams[pipe]
        if has_ended and not ready:  # a process that outlives its rank may still hold the pipe
            return


def with_sources(text: str) -> str:
    """Return a worker's traceback with the source lines that only this process has, those of a notebook's cells."""

    def found(match: re.Match[str]) -> str:
        line = linecache.getline(match[2], int(match[3])).strip()
        return f"{match[1]}    {line}\n" if line else match[1]

    return re.sub(r'^( +File "(.+)", line (\d+), in .+\n)(?!    )', found, text, flags=re.MULTILINE)
