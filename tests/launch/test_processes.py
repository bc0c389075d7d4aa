"""The launcher with real processes: the output of a job, its end, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from deadlines import deadline, wait_until
from interpreters import search_path
from started import GONE_SECONDS, ROOT, Started, python

from trainwright.distributed.network import LOOPBACK
from trainwright.errors import LaunchError
from trainwright.launch import nodes as launch_nodes
from trainwright.launch.nodes import Place
from trainwright.launch.processes import launch, launcher_command
from trainwright.launch.supervisor import ENTRY

SCRIPT = """
import atexit, json, os, signal, sys, time
from pathlib import Path
from trainwright.distributed.connection import open_process_group
from trainwright.distributed.environment import Environment

mode = sys.argv[1]
environment = Environment.detect()
if environment.world_size == 1:
    from trainwright.launch.processes import launch
    if mode == "succeed":
        os.chdir("/")
    launch(2, reason="Trainer(devices=2)")

import torch
from trainwright.distributed.collectives import all_reduce

def report_threads():
    # The last exit handler, so the group has been closed. A thread is joined a moment before the kernel drops it.
    deadline = time.monotonic() + 10
    while (left := sum("gloo" in each.read_text() for each in Path("/proc/self/task").glob("*/comm"))):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    print(f"threads of gloo: {left}", flush=True)

if mode == "wait" and environment.rank == 0:
    atexit.register(report_threads)

connection = open_process_group(environment, "gloo")
assert open_process_group(environment, "gloo") is connection
total = all_reduce(torch.tensor([environment.rank + 1.0])).item()

if mode == "succeed":
    import psutil
    me, launcher = psutil.Process(), psutil.Process(os.getppid())
    print(json.dumps({
        "rank": environment.rank,
        "total": total,
        "launched_by": environment.launched_by,
        "directory": os.getcwd(),
        "threads": os.environ["OMP_NUM_THREADS"],
        "listening": list({c.laddr.ip for p in (me, launcher) for c in p.net_connections() if c.status == "LISTEN"}),
        "launcher": launcher.pid,
    }))
    if environment.rank == 1:
        sys.stdout.write("10%\\r50%\\r100%\\r\\n\\ntail")
    sys.exit(0)
if sys.argv[2:] == ["loader"]:
    batches = iter(torch.utils.data.DataLoader(range(100), num_workers=1))
print("ready", flush=True)
while environment.rank == 0:
    time.sleep(0.1)
all_reduce(torch.zeros(1))
"""


EXITS = """
import os, signal, sys, time
rank, mode = os.environ.get("RANK"), sys.argv[1]
print("starts", flush=True)

def leave(at):
    if rank == "1" and at == mode:
        print("leaves", flush=True)
        if at == "raise":
            error = RuntimeError("boom\\nsecond line")
            error.add_note("the layer was divided")
            raise error
        os.kill(os.getpid(), signal.SIGKILL) if at == "die" else sys.exit(0 if at == "early" else 3)

leave("early")
leave("before")
import trainwright as tw
from small import QUIET, Classifier, make_loader

class Leaver(Classifier):
    def training_step(self, batch, batch_idx):
        for way in ("raise", "die", "within"):
            leave(way)
        while mode == "die":  # does not react to SIGTERM
            time.sleep(0.1)
        return super().training_step(batch, batch_idx)

tw.Trainer(devices=2, max_epochs=1, **QUIET).fit(Leaver(), make_loader())
leave("after")
"""
OTHER_KERNEL = f"""
import runpy, sys
if sys.argv[1] == "launcher":
    from trainwright.launch import processes, supervisor
    supervisor.ENTRY = __file__
    sys.exit(processes.main(sys.argv[2:]))
sys.platform = "darwin"
runpy.run_path({ENTRY!r}, run_name="__main__")
"""


class Job(Started):
    """The script, started in a separate folder, with a temporary folder that must be empty at the end."""

    def __init__(
        self, folder: Path, *arguments: str, command: list[str] | None = None, script: str = SCRIPT, **variables: str
    ) -> None:
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        (folder / "sub").mkdir()
        (folder / "sub" / "train.py").write_text(script)
        left_out = dict.fromkeys(name for name in os.environ if name.startswith(("TORCHELASTIC", "PYTHON")))
        paths = {"PYTHONPATH": search_path(ROOT, ROOT / "tests"), "TMPDIR": str(self.temporary)}
        super().__init__([*(command or python()), "sub/train.py", *arguments], folder, **(left_out | paths | variables))

    def check_nothing_left(self) -> None:
        super().check_nothing_left()
        assert list(self.temporary.iterdir()) == []


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.close()


@pytest.mark.launch
def test_two_workers_run_the_script(tmp_path: Path, jobs: list[Job]) -> None:
    # A file in the working directory named like a standard module must not shadow that.
    (tmp_path / "argparse.py").write_text("raise SystemExit('shadowed')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        job = Job(tmp_path, "succeed", MASTER_PORT=str(taken.getsockname()[1]), OMP_NUM_THREADS="3")
        jobs.append(job)
        assert job.wait() == 0, job.stderr
    assert job.stderr == ""
    lines = job.stdout.splitlines()
    printed = [line for line in lines if line.startswith("[rank1]")]
    assert printed[-3:] == ["[rank1] 100%", "[rank1] ", "[rank1] tail"]  # the tail was printed without a newline
    for rank, prefix in enumerate(("", "[rank1] ")):
        (line,) = [line for line in lines if line.startswith(prefix + "{")]
        assert json.loads(line.removeprefix(prefix)) == {
            "rank": rank,
            "total": 3.0,
            "launched_by": "trainwright",
            "directory": str(tmp_path),  # where the user started it, not where the script changed to
            "threads": "3",
            "listening": ["127.0.0.1"],
            "launcher": job.process.pid,
        }
    job.check_nothing_left()


def test_ranks_share_the_cores_unless_the_user_sets_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    place, job = Place(LOOPBACK, 1, (3,), ("",)), launch_nodes.Job(["train.py"], 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for cores, threads in ((2, "1"), (6, "2"), (7, "2")):
        monkeypatch.setattr(launch_nodes, "num_cores", lambda cores=cores: cores)
        assert place.variables(0, job)["OMP_NUM_THREADS"] == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert place.variables(0, job)["OMP_NUM_THREADS"] == "4"


@pytest.mark.launch
@pytest.mark.parametrize(("mode", "code", "reason"), [
    ("raise", 1, "RuntimeError: boom; the layer was divided; In training_step, with batch 0: (float32 [4, 8], int64 [4])."),
    ("die", 137, "killed by SIGKILL; on Linux this is often the out-of-memory killer"),
    ("early", 1, "it exited with code 0 before it made its Trainer or Accelerator, and the others wait for it"),
    ("before", 3, "exit code 3"),
    ("within", 3, "exit code 3"),
    ("after", 3, "exit code 3"),
])  # fmt: skip
def test_the_first_rank_that_fails_is_named_and_ends_the_job_with_its_exit_code(
    tmp_path: Path, jobs: list[Job], mode: str, code: int, reason: str
) -> None:
    command = python("-m", "trainwright", "launch", "--cpu", "--devices", "2") if mode in ("before", "after") else None
    job = Job(tmp_path, mode, command=command, script=EXITS, TRAINWRIGHT_LOGS=str(tmp_path / "logs"))
    jobs.append(job)
    job.wait_for("[rank1] leaves")
    began = time.monotonic()
    assert job.wait() == code, job.stderr
    assert time.monotonic() - began < deadline(GONE_SECONDS)
    assert job.stderr.endswith(f"trainwright: rank 1 of 2 failed first ({reason}); the job was ended.\n")
    assert job.stderr.count("Traceback") == (mode == "raise")  # rank 0 only lost its peer, and says nothing
    assert ("[rank1] RuntimeError: boom\n[rank1] second line\n" in job.stderr) == (mode == "raise")
    for rank in range(2):
        assert (tmp_path / "logs" / f"rank{rank}.log").read_text().startswith("starts\n")
    job.check_nothing_left()


@pytest.mark.launch
@pytest.mark.parametrize("kernel", ["this", "other"])
def test_a_killed_launcher_takes_its_workers_with_it(tmp_path: Path, jobs: list[Job], kernel: str) -> None:
    """Another kernel than Linux does not end a process with its parent."""
    (tmp_path / "entry.py").write_text(OTHER_KERNEL)
    launcher = python("entry.py", *launcher_command(2, python())[2:])
    job = Job(tmp_path, "wait", "loader", command=launcher if kernel == "other" else None)
    jobs.append(job)
    job.wait_for("ready", times=2)
    ports = {c.laddr.port for p in job.processes() for c in p.net_connections() if c.status == "LISTEN"}
    assert len(ports) == 3
    job.process.kill()
    Started.check_nothing_left(job)
    wait_until(
        lambda: not ports & {c.laddr.port for c in psutil.net_connections() if c.status == "LISTEN"}, GONE_SECONDS
    )
    job.wait()


@pytest.mark.launch
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_all(tmp_path: Path, jobs: list[Job], number: int, code: int) -> None:
    job = Job(tmp_path, "wait")
    jobs.append(job)
    job.wait_for("ready", times=2)
    began = time.monotonic()
    job.process.send_signal(number)
    assert job.wait() == code, job.stderr
    assert time.monotonic() - began < deadline(GONE_SECONDS)
    if number == signal.SIGINT:  # a thread that is left may abort the process
        assert "threads of gloo: 0" in job.stdout
    assert job.stderr.count("KeyboardInterrupt") == (number == signal.SIGINT)  # rank 0's
    assert "RuntimeError" not in job.stderr
    assert "trainwright" not in job.stderr  # no traceback of the launcher, no summary
    job.check_nothing_left()


@pytest.mark.launch
def test_torchrun_is_joined_and_shows_the_first_error(tmp_path: Path, jobs: list[Job]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = Job(tmp_path, "raise", command=torchrun, script=EXITS)
    jobs.append(job)
    assert job.wait() == 1
    assert "boom" in job.stderr
    root_cause = job.stderr.partition("Root Cause (first observed failure)")[2]
    assert "rank      : 1 " in root_cause
    assert "Connection closed" not in job.stderr


def test_a_test_runner_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"Trainer\(devices=2\) needs several processes.*test runner \(pytest\)"):
        launch(2, reason="Trainer(devices=2)")
    with pytest.raises(ValueError, match=r"this script: num_nodes: 2.5: expected an integer of at least 1"):
        launch(1, num_nodes=2.5)  # type: ignore[arg-type]
