"""The launcher: replaces a plain script by a supervisor that runs the same script in several workers.

`launch` is what a Trainer or an Accelerator calls. `main` is the supervisor, `python -m trainwright.launch.processes`.
What each worker is told stands in its environment; `distributed/environment.py` reads it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import NoReturn

from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.launch.command import own_command

HANDLED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def launch(num_processes: int, *, reason: str = "this script") -> NoReturn:
    """Replace this process by the launcher, which runs the same command in several workers.

    What stands before the call in the script runs once more in each worker. Raises LaunchError where the command cannot
    be run again. `reason` begins that message: what asked for the processes.
    """
    if num_processes < 2:
        raise ValueError(f"num_processes={num_processes}; 2 or more are accepted. One process needs no launcher.")
    command = own_command(reason)
    for child in multiprocessing.active_children():
        child.terminate()
        child.join(timeout=5)
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(command.directory)
    os.execv(sys.executable, launcher_command(num_processes, command.arguments))


def launcher_command(num_processes: int, command: list[str], report: str | None = None) -> list[str]:
    """Return the command line of a launcher that runs a command in several workers.

    `report` is a file to which it writes who failed first.
    """
    start = str(Path(__file__).with_name("start.py"))
    flags = [flag for flag, is_set in (("-E", sys.flags.ignore_environment), ("-s", sys.flags.no_user_site)) if is_set]
    options = ["--num-processes", str(num_processes), *(["--report", report] if report else []), *_torch_place()]
    return [sys.executable, *flags, start, *options, "--", *command]


def _torch_place() -> list[str]:
    """Tell the launcher where torch is, for scripts that have changed the search path."""
    torch = sys.modules.get("torch")
    place = getattr(torch, "__file__", None)
    return ["--add-path", str(Path(place).parent.parent)] if place else []


def main(arguments: list[str] | None = None) -> int:
    """Run the launcher and return its exit code."""
    warnings.simplefilter("ignore")  # the job's output is the workers'
    parser = argparse.ArgumentParser(prog="python -m trainwright.launch.processes")
    parser.add_argument("--num-processes", type=int, required=True, help="how many workers to start")
    parser.add_argument("--add-path", action="append", default=[], help="where else to look for torch")
    parser.add_argument("--report", help="a file to write to who failed first")
    parser.add_argument("command", nargs="+", help="after --: the command, which begins with the interpreter")
    options = parser.parse_args(arguments)
    sys.path.extend(path for path in options.add_path if path not in sys.path)
    _prepare_signals()
    _prepare_environment(options.num_processes)
    from trainwright.launch.agent import run

    return run(options.command, options.num_processes, options.report)


def _prepare_signals() -> None:
    """Leave quietly on a signal until elastic's handlers are there, and leave ignored signals ignored (nohup)."""
    handled = [name for name in HANDLED_SIGNALS if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    for name in handled:
        signal.signal(signal.Signals[name], _leave_on_signal)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(handled)


def _leave_on_signal(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


def _prepare_environment(num_processes: int) -> None:
    """Set what all workers share; elastic adds the place of each."""
    job = {"version": 1, "launcher_pid": os.getpid(), "num_processes": num_processes, "loopback": True}
    os.environ[JOB_VARIABLE] = json.dumps(job)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, _num_cores() // num_processes))
    for name in ("TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_HEALTH_CHECK_PORT"):
        os.environ.pop(name, None)  # they would open a file and a port


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
