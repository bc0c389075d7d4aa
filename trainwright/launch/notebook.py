"""Worker calls: run a function in every worker of a new job and return rank 0's result.

For a process whose own command cannot be run again: a notebook, a REPL, a test runner. The same launcher as a script's starts
the workers, as fresh interpreters: a fork could not use a device that is in use here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from trainwright.distributed.environment import JOB_VARIABLE, Environment
from trainwright.distributed.failures import summarize
from trainwright.distributed.signals import STOP_SIGNALS, STOPPED_EXIT_CODE
from trainwright.errors import LaunchError, RunStopped, WorkerFailed
from trainwright.launch.carried_traceback import carry, render
from trainwright.launch.nodes import Nodes
from trainwright.launch.packing import pack, read_result, unpack, write_result
from trainwright.launch.processes import launcher_command
from trainwright.launch.relay import run_launcher

WORK, SEARCH_PATH, RESULT, REPORT = "work", "search_path.json", "result", "report"


def run_in_workers(
    function: Callable[..., Any],
    named: dict[str, Any],
    num_processes: int,
    *,
    folder: Path,
    asked: str,
    nodes: Nodes | None = None,
    defaults: dict[str, str] | None = None,
) -> Any:
    """Run `function(folder, **named)` in every worker of a new job; return what it returned on rank 0, None on other nodes.

    Args:
        function: imported by the workers, or copied to them if they cannot; returns plain data and tensors.
        named: its arguments, by the names that errors use for them.
        num_processes: the workers on this node.
        folder: an empty folder for this job only.
        asked: the call that needs the job, for errors.
        nodes: the job's nodes, by default this one.
        defaults: the precision and the accelerator, for settings that the function leaves open.

    Raises:
        TypeError: an argument cannot be copied.
        WorkerFailed, LaunchError: a rank failed, or the job could not be started.
        RunStopped: a signal stopped it.
    """
    pack(folder / WORK, {**named, "the function": function}, asked)
    lists = {"path": [str(entry) for entry in sys.path], "argv": [str(each) for each in sys.argv]}
    (folder / SEARCH_PATH).write_text(json.dumps({**lists, "defaults": defaults or {}}), encoding="utf-8")
    worker = str(Path(__file__).with_name("worker.py"))
    # -W, -X, -O and others of this interpreter, which a new one would not have.
    flags = cast("list[str]", cast(Any, subprocess)._args_from_interpreter_flags())
    command = [sys.executable, *flags, worker, str(folder)]
    code = run_launcher(launcher_command(num_processes, command, nodes, report=str(folder / REPORT)))
    if code == 0 and nodes is not None and nodes.rank != 0:
        return None
    result = folder / RESULT
    stopped = (STOPPED_EXIT_CODE, *(128 + number for number in STOP_SIGNALS))
    # The launcher reports only a rank that has failed, which counts more than a signal that came after it.
    if code in stopped and not (folder / REPORT).exists():
        raise RunStopped(code)
    if code != 0 or not result.exists():
        raise _failed(folder, code, asked)
    return read_result(result)


def work(folder: str) -> None:
    """Do the work in a worker, and write what rank 0 returned."""
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
            write_result(path / f"{RESULT}.part", result)
            # Renamed, so that a rank that is killed while it writes leaves no half of a result.
            os.rename(path / f"{RESULT}.part", path / RESULT)
    except Exception as error:
        carried = {"summary": summarize(error), "traceback": carry(error)}
        (path / f"error-{rank}").write_text(json.dumps(carried), encoding="utf-8")
        raise


def _failed(folder: Path, code: int, asked: str) -> Exception:
    report = folder / REPORT
    if code == 0:
        return WorkerFailed(f"{asked}: a worker exited before its work was done; do not call sys.exit() in it.")
    if not report.exists():
        return LaunchError(
            f"{asked}: the launcher of its workers ended with exit code {code} before their work was done; its output is "
            "above. Run the work as a script to see more."
        )
    text = report.read_text(encoding="utf-8").strip()
    failed = re.search(r"rank (\d+)", text)
    errors = sorted(
        folder.glob("error-*"), key=lambda each: (failed is None or each.name != f"error-{failed[1]}", each.name)
    )
    if not errors:
        return WorkerFailed(f"{asked}: {text} Any traceback was printed to standard error.")
    carried = json.loads(errors[0].read_text(encoding="utf-8"))
    if "(exit code" in text:  # it failed before or after it was connected to the others
        text = f"{text} ({carried['summary']})"
    rank = errors[0].name.removeprefix("error-")
    return WorkerFailed(f"{asked}: {text}\n\nOn rank {rank}:\n{render(carried['traceback'])}")
