"""What the Engine asks of every strategy, step by step, and state out of each and into others, on two ranks over gloo.

One job a strategy makes all the checks of seam_job.py; any that fails ends it with an error.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import deadline

JOB = Path(__file__).with_name("seam_job.py")
FIGURES = [
    "automatic norm losses",
    "automatic norm state",
    "automatic value state",
    "short window state",
    "manual plain state",
    "manual toggle state",
    "manual at root state",
    "collectives in a forward",
    "evaluation loss",
    "state in and out",
    "resumed (bitwise)",
    "manual resumed (bitwise)",
    "single -> {name}",
    "{name} -> single",
    "Accelerator against ddp",
    "Trainer test loss",
    "Trainer test of a checkpoint",
    "Trainer automatic resumed (bitwise)",
    "Trainer automatic resumed under ddp",
    "Trainer manual against ddp",
    "Trainer manual resumed (bitwise)",
]


def run_job(name: str) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port), str(JOB), name]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(JOB.parents[2]), environment.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=deadline(200), check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "ddp_sharded", "fsdp", "zero1", "zero2", "zero3"])
def test_seam(name: str) -> None:
    printed = run_job(name)
    for figure in FIGURES:
        assert re.search(rf"^{re.escape(figure.format(name=name))}: ", printed, re.MULTILINE), figure
