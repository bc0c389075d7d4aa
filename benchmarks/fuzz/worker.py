"""One process that runs cases of a kind: a socket brings one JSON line per case, and takes one line back.

    python -m fuzz.worker KIND SOCKET        started by job.py, by itself or by the launcher

A single process forks for each case, so a case that kills or hangs its process loses only its own answer. In a job of several
processes it runs the case itself, since processes in a process group cannot be forked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from fuzz.kind import Config, Kind, Refused

Answer = dict[str, Any]
"""`differences`; `refused`, a text or None; `spent`, whether the process cannot be trusted with another case."""

LATE = ("trainwright.trainer.trainer", "trainwright.raw_loop.accelerator", "trainwright.loggers.csv")
"""What a run imports where it first needs it: most of a small run's time, if each fork did."""


def ask(kind: Kind, config: Config, folder: Path) -> Answer:
    """Run a case here and return the outcome."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return {"differences": kind.differences(config, folder), "refused": None, "spent": False}
        except Refused as refusal:
            return {"differences": [], "refused": str(refusal), "spent": False}
        except BaseException as error:
            text = "".join(traceback.format_exception(error, limit=-4))[-2500:]
            found = [f"exception: {type(error).__name__}: {error}\n{text}"]
            return {"differences": found, "refused": None, "spent": True}


def ask_fork(kind: Kind, config: Config, folder: Path, limit: float) -> Answer:
    """Run a case in a fork of this process."""
    reading, writing = os.pipe()
    output = folder / "output"
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        with open(output, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        faulthandler.dump_traceback_later(limit * 0.9)
        answer = json.dumps(ask(kind, config, folder)).encode()
        os.write(writing, answer[:60_000])  # fits into the pipe
        os._exit(0)
    os.close(writing)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(child, child)
    ready, _, _ = select.select([reading], [], [], limit)
    text = b""
    while ready and (part := os.read(reading, 65536)):
        text += part
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # its loaders' workers too
    _, status = os.waitpid(child, 0)
    if text:
        return dict(json.loads(text))
    said = output.read_text()[-2500:] if output.exists() else ""
    how = f"exit: the process ended with {os.waitstatus_to_exitcode(status)}" if ready else f"hang: {limit:.0f} s"
    return {"differences": [f"{how}\n{said}"], "refused": None, "spent": False}


def main() -> None:
    kind: Any = importlib.import_module(f"fuzz.{sys.argv[1]}" if "." not in sys.argv[1] else sys.argv[1])
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    for name in LATE if "trainwright" in sys.modules else ():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that the collections of forks leave it alone, and its pages stay shared
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[2])
    lines = connection.makefile("rw")
    print(json.dumps({"rank": int(os.environ.get("RANK", "0"))}), file=lines, flush=True)
    for line in lines:
        told = json.loads(line)
        folder = Path(told["folder"])
        if alone:
            answer = ask_fork(kind, told["config"], folder, kind.LIMIT)
        else:
            faulthandler.dump_traceback_later(kind.LIMIT * 0.9)
            answer = ask(kind, told["config"], folder)
            faulthandler.cancel_dump_traceback_later()
        print(json.dumps(answer), file=lines, flush=True)
    os._exit(0)  # what is left of a job is not waited for


if __name__ == "__main__":
    main()
