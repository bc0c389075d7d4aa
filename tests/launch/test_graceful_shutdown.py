"""A job whose launcher, or one of whose ranks, is signalled: it is saved, ends in time, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from deadlines import deadline
from forked import interpret, run_ranks
from small import assert_equal
from started import GONE_SECONDS, Started, python

from trainwright.checkpoint.discovery import find_checkpoints
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.launch.config import Config, setting_of

pytestmark = pytest.mark.launch
JOB = str(Path(__file__).with_name("stopped_job.py"))
LAUNCH = python(
    "-m", "trainwright", "launch", "--cpu", "--devices", "2", "--grace-seconds", "60", "--max-restarts", "1"
)


class Job(Started):
    """The run in a folder, with a separate temporary folder that must be empty at the end."""

    def __init__(
        self,
        folder: Path,
        pause: float,
        devices: int = 2,
        command: list[str] | None = None,
        strategy: str = "auto",
        **more: str,
    ) -> None:
        folder.mkdir(exist_ok=True)
        # Not in the test's folder: the loader workers' sockets lie there, and a socket's path is at most 107 letters long.
        self.folder, self.temporary = folder, Path(tempfile.mkdtemp(prefix="tw"))
        self.shared = set(os.listdir("/dev/shm"))
        arguments = [
            *(command or python("-W", "error")), JOB, str(folder), str(devices), str(deadline(pause)), strategy,
        ]  # fmt: skip
        super().__init__(arguments, folder, TMPDIR=str(self.temporary), **more)

    def reach(self, count: int) -> None:
        """Wait for the n-th event of this run."""
        self.wait_for(f"event {count} ")
        self.pids |= {str(process.pid) for process in self.processes()}

    def ranks(self) -> list[psutil.Process]:
        found = [each for each in self.processes() if each.ppid() == self.process.pid]
        assert len(found) == 2
        return sorted(found, key=lambda each: each.environ()["RANK"])

    def check_saved(self) -> str:
        """Return the checkpoint that it reports as saved, after checking it."""
        (path,) = re.findall(r"it is saved as (\S+)\. Run the same command with ckpt_path=\"auto\"", self.stderr)
        open_checkpoint(path)
        assert self.stderr.count("trainwright: ") == 1, self.stderr
        return str(path)

    def check_nothing_left(self) -> None:
        super().check_nothing_left()
        assert [each for each in self.temporary.iterdir() if not each.name.startswith("torchinductor")] == []  # a cache
        names = set(os.listdir("/dev/shm")) - self.shared
        mine = {name for name in names if name.startswith("torch_") and name.split("_")[1] in self.pids}
        assert mine == set()
        assert [each for each in (self.folder / "checkpoints").iterdir() if each.suffix != ".ckpt"] == []

    pids: frozenset[str] = frozenset()


StartJob = Callable[..., Job]


@pytest.fixture
def start() -> Iterator[StartJob]:
    jobs: list[Job] = []

    def begin(*arguments: Any, **options: Any) -> Job:
        jobs.append(Job(*arguments, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()
        shutil.rmtree(job.temporary)


def check_equal(left: Path, right: Path) -> None:
    """Check that two runs ended bitwise equal, after the same batches."""
    ends = [open_checkpoint(str(folder / "final.ckpt")) for folder in (left, right)]
    tensors = [
        {f"{part}/{name}": end.read_tensor(part, name) for part in end.sections for name in end.tensors(part)}
        for end in ends
    ]
    assert_equal(*tensors)
    counters = [{**end.run_state()["position"], "saves": 0} for end in ends]  # the save of the stop is one more
    assert counters[0] == counters[1]
    for rank in range(2):
        assert (left / f"seen-{rank}").read_text() == (right / f"seen-{rank}").read_text()


def run_here(folder: Path, strategy: str = "auto") -> None:
    """Run the job to its end on forked ranks, without a signal."""
    folder.mkdir(exist_ok=True)
    run_ranks(interpret, ([JOB, str(folder), "2", "0.0", strategy],), 2, folder, 120.0)


def test_a_signalled_job_resumes_bitwise(tmp_path: Path, start: StartJob) -> None:
    job = start(tmp_path / "stopped", 0.05)
    job.reach(9)
    began = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    job.process.send_signal(signal.SIGTERM)  # a repeated signal changes nothing
    assert job.wait() == 75, job.stderr
    assert time.monotonic() - began < deadline(60)
    assert "/stop-step=" in job.check_saved()
    job.check_nothing_left()
    again = start(tmp_path / "stopped", 0.0)
    assert again.wait() == 0, again.stderr
    run_here(tmp_path / "whole")
    check_equal(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_terminal_stops_the_run(times: int, tmp_path: Path, start: StartJob) -> None:
    """It goes to the whole group: this process and its loader workers."""
    leader = ["setsid", "--wait", sys.executable, "-W", "error", "-c"]
    code = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    job = start(tmp_path, 0.05 if times == 1 else 3.0, 1, command=[*leader, code, sys.executable, "-W", "error"])
    job.reach(5 if times == 1 else 3)
    assert len(job.processes()) >= 3
    (group,) = {os.getpgid(each.pid) for each in job.processes() if each.pid != job.process.pid}
    began = time.monotonic()
    for number in range(times):
        time.sleep(0.3 * number)
        os.killpg(group, signal.SIGINT)
    assert job.wait() == 130, job.stderr
    assert time.monotonic() - began < deadline(GONE_SECONDS if times == 1 else 3.0 + GONE_SECONDS)
    assert "Traceback" not in job.stderr
    if times == 1:
        assert "/stop-step=" in job.check_saved()
        job.check_nothing_left()
    else:
        assert job.stderr == ""
        Started.check_nothing_left(job)
        assert find_checkpoints(str(tmp_path / "checkpoints")) == []


def test_a_rank_that_cannot_answer_is_killed_after_the_grace_seconds(tmp_path: Path, start: StartJob) -> None:
    job = start(tmp_path, 0.05, TRAINWRIGHT_GRACE_SECONDS="2")
    job.reach(5)
    job.ranks()[1].send_signal(signal.SIGSTOP)
    job.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert job.wait() == 143
    assert 2 <= time.monotonic() - began < 2 + deadline(GONE_SECONDS)
    assert "trainwright: the ranks had not left 2 s after SIGTERM and were killed" in job.stderr
    assert "failed first" not in job.stderr
    Started.check_nothing_left(job)
    assert not [each.path for each in find_checkpoints(str(tmp_path / "checkpoints")) if "stop-" in each.path]


@pytest.mark.parametrize("text", ["-1", "soon"])
def test_a_wrong_number_of_grace_seconds_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=f"TRAINWRIGHT_GRACE_SECONDS={text}: expected an integer of at least 0."):
        setting_of("grace_seconds", {}, {"TRAINWRIGHT_GRACE_SECONDS": text}, Config())


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "signals"), [
    ("ddp", ("launcher", "rank", "launcher")),
    ("ddp_sharded", ("launcher",)),
    ("fsdp", ("launcher",)),
    ("deepspeed_stage_2", ("launcher",)),
])  # fmt: skip
def test_signals_at_random_moments_lose_nothing(
    strategy: str, signals: tuple[str, ...], tmp_path: Path, start: StartJob
) -> None:
    """Every run of a chain is stopped somewhere: the first step, a window, a validation, a save. The last one ends.

    The jobs are started by `trainwright launch`. A signal to one of its ranks stops all of them too.
    """
    draw = random.Random(strategy)
    folder = tmp_path / "stopped"
    variables = {} if strategy.startswith("deepspeed") else {"PYTHONWARNINGS": "error"}  # importing it causes warnings
    for to in signals:
        job = start(folder, 0.03, strategy=strategy, command=LAUNCH, **variables)
        job.reach(draw.randint(1, 8))
        time.sleep(draw.random() * 0.1)
        began = time.monotonic()
        if to == "rank":
            job.ranks()[1].send_signal(signal.SIGUSR1)
        else:
            job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 75, job.stderr
        assert time.monotonic() - began < deadline(60)
        job.stderr = job.stderr.partition("grace_seconds")[2]  # below the resolved settings
        job.check_saved()
        job.check_nothing_left()
    run_here(folder, strategy)
    run_here(tmp_path / "whole", strategy)
    check_equal(folder, tmp_path / "whole")
