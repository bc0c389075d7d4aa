"""Loader workers that are killed or hang, and kills by the kernel's out-of-memory killer, in real jobs."""

from __future__ import annotations

import re
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_rows import record_row
from started import Started, python

pytestmark = pytest.mark.faults
JOB = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
import trainwright as tw
from trainwright.faults import hangs
from small import QUIET, Classifier

mode, devices = sys.argv[1], int(sys.argv[2])
hangs.SHORTEST_LIMIT, hangs.FIRST_LIMIT, hangs.GAP_FACTOR = 6.0, 6.0, 1.0

def use_memory():
    kept = []
    while True:
        kept.append(b"x" * (32 << 20))
        time.sleep(0.01)

class Digits(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        if index == 20:
            print("fault", flush=True)
            if mode == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if mode == "takes all memory":
                use_memory()
            if mode in ("hangs", "times out", "sleeps"):
                time.sleep(1000 if mode == "sleeps" else 12)
        return torch.zeros(8), 0

class Net(Classifier):
    def training_step(self, batch, batch_idx):
        if mode == "rank takes all memory" and self.global_rank == 1:
            print("fault", flush=True)
            use_memory()
        return super().training_step(batch, batch_idx)

loader = DataLoader(Digits(), batch_size=4, num_workers=2, timeout=7 if mode == "times out" else 0)
tw.Trainer(devices=devices, max_epochs=1, **QUIET).fit(Net(), loader)
"""
StartJob = Callable[..., Started]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for sockets, whose paths would be too long in the test's folder."""
    with tempfile.TemporaryDirectory(prefix="tw") as folder:
        yield Path(folder)


@pytest.fixture
def start(tmp_path: Path, temporary: Path) -> Iterator[StartJob]:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    jobs: list[Started] = []

    def begin(mode: str, devices: int = 1, command: list[str] | None = None, **variables: str) -> Started:
        arguments = [*(command or []), *python(), str(script), mode, str(devices)]
        jobs.append(Started(arguments, tmp_path, TMPDIR=str(temporary), **variables))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()
        job.check_nothing_left()


WORKER = r"worker 1 \(pid \d+\) of the loader of Digits"
BATCH = r"batch 5 of the epoch \(indices 20, 21, 22, 23\)"
TEXTS = {
    "is killed": (
        rf"It is {WORKER}, which has not delivered .*{BATCH}.*: killed by SIGKILL; on Linux this is often",
        1,
    ),
    "times out": (rf"DataLoader timed out after 7 seconds, waiting for {WORKER}, .* delivered {BATCH}", 1),
    "hangs": (rf"Hang for \d+ s: rank 0 made no progress, .* waiting for {WORKER}, which has not delivered {BATCH}", 0),
}
"""The message of a job whose worker fails in one way, and the exit code."""


@pytest.mark.parametrize("mode", list(TEXTS))
def test_a_failing_worker_is_named_with_its_batch(mode: str, start: StartJob) -> None:
    text, code = TEXTS[mode]
    job = start(mode)
    job.wait_for("fault")
    began = time.monotonic()
    assert job.wait() == code, job.stderr
    lines = [line for line in job.stderr.splitlines() if re.search(text, line)]
    assert lines, job.stderr  # more than one: a chain of errors, or both workers
    record_row(f"a loader worker {mode}", time.monotonic() - began, lines[0], f"exit code {code}")


def test_a_run_that_ends_while_its_worker_sleeps_leaves_nothing(start: StartJob, temporary: Path) -> None:
    job = start("sleeps", TRAINWRIGHT_GRACE_SECONDS="2")
    job.wait_for("fault")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.stderr
    assert list(temporary.glob("pymp-*")) == []


@pytest.fixture
def limited() -> Iterator[list[str]]:
    """A command that runs another in a new cgroup with 2 GiB of memory."""
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    is_old = "memory" in groups
    root = f"/sys/fs/cgroup{'/memory' if is_old else ''}{groups.get('memory', groups.get('', ''))}"
    group = Path(root) / f"trainwright-{uuid.uuid4().hex}"
    limit = group / ("memory.limit_in_bytes" if is_old else "memory.max")
    try:
        group.mkdir()
        limit.write_text(str(2 << 30))
    except OSError as error:
        pytest.skip(f"no cgroup with a limit can be made here: {error}")
    yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    group.rmdir()


@pytest.mark.parametrize(("mode", "devices", "where"), [
    ("takes all memory", 1, rf"It is {WORKER}.*:"),
    ("rank takes all memory", 2, r"trainwright: rank 1 of 2 failed first \("),
])  # fmt: skip
def test_the_out_of_memory_killer_is_named(
    mode: str, devices: int, where: str, limited: list[str], start: StartJob
) -> None:
    job = start(mode, devices, command=limited)
    job.wait_for("fault")
    began = time.monotonic()
    assert job.wait() == (137 if devices == 2 else 1), job.stderr
    killed = (
        rf"{where} ?killed by SIGKILL of the out-of-memory killer, \d kills? in this cgroup since the start; take a"
    )
    line = next(line for line in job.stderr.splitlines() if re.search(killed, line))
    record_row(f"out of memory: {mode}", time.monotonic() - began, line, f"exit code {job.process.returncode}")
