"""The launcher: `launch` replaces a script by a supervisor, `main`, which runs the same script in several workers."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import warnings
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import NoReturn

from trainwright.devices import num_cores
from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.distributed.job_store import serve_store
from trainwright.distributed.network import LOOPBACK, listen_at, loopback_interface
from trainwright.errors import LaunchError
from trainwright.launch.command import own_command
from trainwright.launch.config import Config, nodes_of, setting_of, settings_of
from trainwright.launch.nodes import Job, JobOutcome, Nodes, Place
from trainwright.launch.supervisor import ENTRY, Supervisor

__all__ = ["launcher_command"]


def launch(num_processes: int, *, num_nodes: int = 1, reason: str = "this script") -> NoReturn:
    """Replace this process by the launcher, which runs the same command in several workers.

    Code before the call in the script runs again in every worker. `reason` says in errors why the processes are needed. With
    several nodes, which of them this is comes from NODE_RANK, MASTER_ADDR and MASTER_PORT.

    Raises:
        LaunchError: the command cannot be run again.
        ValueError: one of these variables is missing or wrong.
    """
    from trainwright.distributed.failures import flush_streams  # not at the launcher's start, because it imports torch

    of_script = Config("this script", values={"num_nodes": str(num_nodes)})
    nodes = nodes_of(settings_of({}, os.environ, of_script))
    command, directory = own_command(reason)
    # execv skips Python's exit handlers, so loader workers would stay and buffered output would be lost.
    for child in multiprocessing.active_children():
        child.terminate()
        child.join(timeout=5)
    flush_streams()
    os.chdir(directory)
    os.execv(sys.executable, launcher_command(num_processes, command, nodes))


def launcher_command(
    num_processes: int, command: list[str], nodes: Nodes | None = None, report: str | None = None
) -> list[str]:
    """Return the command line of a launcher, as `main` reads it. `report` is the `Job`'s."""
    settings: dict[str, object] = {"num_processes": num_processes, "report": report}
    if nodes is not None:
        settings["nodes"] = asdict(nodes)
    # The script may have found torch on a search path that it changed itself.
    if torch_file := getattr(sys.modules.get("torch"), "__file__", None):
        settings["path"] = str(Path(torch_file).parent.parent)
    return [sys.executable, ENTRY, "launcher", json.dumps(settings), *command]


def main(arguments: list[str]) -> int:
    """Run the launcher and return its exit code. The arguments are settings as JSON, and the command of the ranks."""
    settings, *command = arguments
    fields = json.loads(settings)
    if (path := fields.pop("path", None)) not in (None, *sys.path):
        sys.path.append(path)
    nodes = Nodes(**fields.pop("nodes", {}))
    of_job = {name: setting_of(name, {}, os.environ, Config()).value for name in ("grace_seconds", "logs", "job_id")}
    return supervise(Job(command, nodes=nodes, **fields, **of_job), {})


def supervise(job: Job, defaults: dict[str, str | None]) -> int:
    """Run a job's workers on this node and return its exit code. `defaults` are settings that the script may leave open."""
    warnings.simplefilter("ignore")  # the job's output is the workers'
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # a service may have none
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    _prepare_environment(job, defaults)
    # Looking for garbage among torch's objects takes 0.1 s while it is imported, and 0.2 s when the launcher ends.
    gc.disable()
    try:
        if job.logs is not None:
            os.makedirs(job.logs, exist_ok=True)
        if job.nodes.count == 1:
            outcome = _run_machine(job)
        else:
            from trainwright.launch.elastic import run_node

            outcome = run_node(job)
    except (LaunchError, OSError) as error:
        outcome = JobOutcome(1, rest=f"trainwright: {error}\n")
    gc.freeze()
    line = f"{outcome.reason}; the job was ended."
    if outcome.reason and job.report is not None:
        Path(job.report).write_text(line, encoding="utf-8")
    print(f"trainwright: {line}\n" * bool(outcome.reason) + outcome.rest, end="", file=sys.stderr, flush=True)
    return outcome.code


def _run_machine(job: Job) -> JobOutcome:
    """Run a job of one machine to its end."""
    supervisor = Supervisor(job)
    supervisor.handle_signals()
    listener = listen_at(LOOPBACK, job.nodes.port)
    port = int(listener.getsockname()[1])
    open_store = cache(lambda: serve_store(listener, LOOPBACK))
    for start in range(job.max_restarts + 1):
        outcome = supervisor.run(Place(LOOPBACK, port, (job.num_processes,), ("",), start=start), open_store)
        if not outcome.reason or supervisor.signal:
            break
        if start < job.max_restarts:
            then = f"restarting all ranks, restart {start + 1} of {job.max_restarts}"
            print(f"trainwright: {outcome.reason}; {then}.\n{outcome.rest}", end="", file=sys.stderr, flush=True)
    return outcome


def _prepare_environment(job: Job, defaults: dict[str, str | None]) -> None:
    """Set the variables of all workers of this node. Elastic adds the variables of single ranks."""
    is_alone = job.nodes.count == 1
    settings = {"version": 1, "launcher_pid": os.getpid(), "num_processes": job.num_processes, "loopback": is_alone}
    given = {name: value for name, value in defaults.items() if value is not None}
    os.environ[JOB_VARIABLE] = json.dumps({**settings, **given})
    loopback = loopback_interface()
    if loopback is not None and is_alone:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if "OMP_NUM_THREADS" not in os.environ:
        # Without it every rank's torch starts one thread per core.
        os.environ["OMP_NUM_THREADS"] = str(max(1, num_cores() // job.num_processes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
