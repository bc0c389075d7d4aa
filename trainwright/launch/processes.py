"""The launcher: `launch` replaces a script by a supervisor, `main`, which runs the same script in several workers."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NoReturn

from trainwright.devices import num_cores
from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.distributed.job_store import serve_store
from trainwright.distributed.network import LOOPBACK, listen_at, loopback_interface
from trainwright.errors import LaunchError
from trainwright.launch.command import own_command
from trainwright.launch.nodes import JOB_ID_VARIABLE, LOGS_VARIABLE, Job, JobOutcome, Nodes, Place, nodes_of
from trainwright.launch.supervisor import Supervisor

__all__ = ["GRACE_VARIABLE", "launcher_command"]

GRACE_VARIABLE, GRACE_SECONDS = "TRAINWRIGHT_GRACE_SECONDS", 120
"""How long the ranks have to save and exit after a signal: the variable that sets it, and the default."""


def launch(num_processes: int, *, num_nodes: int = 1, reason: str = "this script") -> NoReturn:
    """Replace this process by the launcher, which runs the same command in several workers.

    Code before the call in the script runs again in every worker. `reason` says in errors why the processes are needed. With
    several nodes, which of them this is comes from NODE_RANK, MASTER_ADDR and MASTER_PORT.

    Raises:
        LaunchError: the command cannot be run again.
        ValueError: one of these variables is missing or wrong.
    """
    from trainwright.distributed.failures import flush_streams  # not at the launcher's start, because it imports torch

    if num_processes < 2 and num_nodes == 1:
        raise ValueError(f"num_processes={num_processes}; 2 or more are accepted. One process needs no launcher.")
    nodes = nodes_of(num_nodes, os.environ)
    grace_seconds(os.environ)
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
    options: dict[str, object] = {"--num-processes": num_processes}
    if nodes is not None and (nodes.count > 1 or nodes.port):
        options |= {"--num-nodes": nodes.count, "--node-rank": nodes.rank}
        options |= {"--main-address": nodes.address, "--main-port": nodes.port}
    # The script may have found torch on a search path that it changed itself.
    if torch_file := getattr(sys.modules.get("torch"), "__file__", None):
        options["--add-path"] = Path(torch_file).parent.parent
    if report is not None:
        options["--report"] = report
    entry = str(Path(__file__).with_name("entry.py"))
    return [
        sys.executable,
        entry,
        "launcher",
        *(str(each) for pair in options.items() for each in pair),
        "--",
        *command,
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the launcher and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainwright.launch.processes")
    parser.add_argument("--num-processes", type=int, required=True, help="how many workers to start")
    parser.add_argument("--num-nodes", type=int, default=1, help="how many machines the job has")
    parser.add_argument("--node-rank", type=int, default=0, help="this machine's number")
    parser.add_argument("--main-address", default=LOOPBACK, help="the address of machine 0")
    parser.add_argument("--main-port", type=int, default=0, help="the port there; 0 chooses a free one")
    parser.add_argument("--add-path", action="append", default=[], help="another folder to search for torch")
    parser.add_argument("--report", help="a file for which rank failed first")
    parser.add_argument("command", nargs="+", help="after --: the command, which begins with the interpreter")
    options = parser.parse_args(arguments)
    sys.path.extend(path for path in options.add_path if path not in sys.path)
    nodes = Nodes(options.num_nodes, options.node_rank, options.main_address, options.main_port)
    job = Job(
        options.command,
        options.num_processes,
        nodes,
        report=options.report,
        grace_seconds=grace_seconds(os.environ),
        logs=os.environ.get(LOGS_VARIABLE),
        job_id=os.environ.get(JOB_ID_VARIABLE),
    )
    return supervise(job, {})


def supervise(job: Job, defaults: dict[str, str | None]) -> int:
    """Run a job's workers on this node and return its exit code. `defaults` are settings that the script may leave open."""
    warnings.simplefilter("ignore")  # the job's output is the workers'
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # a service may have none
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if job.logs is not None:
        os.makedirs(job.logs, exist_ok=True)
    _prepare_environment(job, defaults)
    # Looking for garbage among torch's objects takes 0.1 s while it is imported, and 0.2 s when the launcher ends.
    gc.disable()
    try:
        if job.nodes.count == 1:
            outcome = _run_machine(job)
        else:
            from trainwright.launch.elastic import run_node

            outcome = run_node(job)
    except LaunchError as error:
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


def grace_seconds(variables: Mapping[str, str]) -> int:
    """Return how long the ranks have to exit after a signal (ValueError if the variable is wrong)."""
    given = variables.get(GRACE_VARIABLE) or str(GRACE_SECONDS)
    if not (given.isascii() and given.isdigit()):
        raise ValueError(
            f"the environment has {GRACE_VARIABLE}={given!r}. Expected an integer of at least 0, in seconds. Set it to the "
            f"longest time of a step and a save, or unset it for {GRACE_SECONDS}."
        )
    return int(given)


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
    sys.exit(main())
