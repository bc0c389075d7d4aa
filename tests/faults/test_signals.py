"""Signals to real jobs: further ones, one Ctrl-C to every process, a process that hangs, and a clock that jumps."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from deadlines import deadline
from fault_rows import record_row
from started import GONE_SECONDS, Started, python

from trainwright.checkpoint.reader import open_checkpoint

pytestmark = pytest.mark.faults
JOB = """
import atexit, os, sys, time
import trainwright as tw
from small import QUIET, Classifier, make_loader

folder, devices, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def stuck():
    while mode == "loops" or time.sleep(1) is None:
        pass

class Events(tw.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        print("step", trainer.global_step, flush=True)
        if trainer.global_step == 3 and mode in ("loops", "sleeps"):
            stuck()
        time.sleep(0.1)

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3 and mode == "forks":
            trainer.save_checkpoint(folder + "/background.ckpt", blocking=False)
            if (child := os.fork()) == 0:
                sys.exit(0)
            print("child", os.waitpid(child, 0)[1], flush=True)

    def on_save_checkpoint(self, *_):
        print("save", flush=True)
        time.sleep(6 if mode == "saves" else 0.5)

saver = tw.ModelCheckpoint(dirpath=folder + "/checkpoints", every_n_train_steps=4, save_top_k=-1)
settings = {**QUIET, "enable_checkpointing": True, "max_epochs": 1 if mode in ("forks", "clock") else 50}
trainer = tw.Trainer(devices=devices, callbacks=[saver, Events()], **settings)
atexit.register(time.sleep, 1.0)  # so that signals also arrive while the interpreter ends
trainer.fit(Classifier(), make_loader(40, 4))
"""
STARTS = {
    "one process": (1, python()),
    "python": (2, python()),
    "launch": (2, python("-m", "trainwright", "launch", "--cpu", "--devices", "2")),
    "torchrun": (2, python("-m", "torch.distributed.run", "--nproc-per-node", "2")),
}
"""How a job is started: the number of its ranks, and the command before the script."""
StartJob = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartJob]:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    jobs: list[Started] = []

    def begin(how: str, mode: str = "", **variables: str) -> Started:
        ranks, command = STARTS[how]
        jobs.append(Started([*command, str(script), str(tmp_path), str(ranks), mode], tmp_path, **variables))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def send_to_all(job: Started, number: int, how: str = "") -> None:
    for process in job.processes():
        with suppress(psutil.Error):  # it may have ended meanwhile
            if how != "torchrun" or "RANK" in process.environ():  # torchrun itself ends at once at the second signal
                process.send_signal(number)


def check_saved(job: Started, folder: Path) -> str:
    """Check that the run was saved once, and return the line that says so."""
    (line,) = [line for line in job.stderr.splitlines() if "it is saved as" in line]
    open_checkpoint(line.partition("saved as ")[2].partition(". Run")[0])
    assert [each for each in (folder / "checkpoints").iterdir() if each.suffix != ".ckpt"] == []
    job.check_nothing_left()
    return line


@pytest.mark.parametrize("how", list(STARTS))
def test_further_sigterms_do_not_change_the_exit_code(how: str, tmp_path: Path, start: StartJob) -> None:
    """They come every 50 ms to every process, from a step until the end of the process."""
    job = start(how)
    job.wait_for("step 2")
    began = time.monotonic()
    while job.process.poll() is None:
        send_to_all(job, signal.SIGTERM, how)
        time.sleep(0.05)
    assert job.wait() == 75 or "exitcode  : 75" in job.stderr, job.stderr
    record_row(f"SIGTERM every 50 ms ({how})", time.monotonic() - began, check_saved(job, tmp_path), "exit code 75")


@pytest.mark.parametrize("how", ["one process", "python", "launch"])
def test_one_ctrl_c_to_every_process_counts_once(how: str, tmp_path: Path, start: StartJob) -> None:
    """It comes during a save, and the launcher passes it on to ranks that had it from the terminal."""
    job = start(how)
    job.wait_for("save")
    began = time.monotonic()
    send_to_all(job, signal.SIGINT)
    assert job.wait() == 130, job.stderr
    record_row(
        f"Ctrl-C to every process ({how})", time.monotonic() - began, check_saved(job, tmp_path), "exit code 130"
    )


def test_a_second_ctrl_c_ends_a_job_that_hangs(start: StartJob) -> None:
    job = start("python", "sleeps")
    job.wait_for("step 3")
    began = time.monotonic()
    for _ in range(2):
        job.process.send_signal(signal.SIGINT)
        time.sleep(1)
    assert job.wait() == 130, job.stderr
    assert time.monotonic() - began < deadline(GONE_SECONDS)
    job.check_nothing_left()
    assert "trainwright: second Ctrl-C; the ranks were killed." in job.stderr


@pytest.mark.parametrize(("mode", "times", "grace"), [("loops", 2, ""), ("sleeps", 1, "3")])
def test_a_process_that_hangs_in_user_code_leaves_with_its_stack(
    mode: str, times: int, grace: str, start: StartJob
) -> None:
    """A loop ends at a further SIGTERM after 5 s, and a sleep after the grace seconds."""
    job = start("one process", mode, **({"TRAINWRIGHT_GRACE_SECONDS": grace} if grace else {}))
    job.wait_for("step 3")
    began = time.monotonic()
    for _ in range(times):
        job.process.send_signal(signal.SIGTERM)
        time.sleep(6)
    assert job.wait() == 143, job.stderr
    job.check_nothing_left()
    assert "s after SIGTERM, so the process ends. Nothing is saved. The main thread hangs here:" in job.stderr
    assert "in stuck\n" in job.stderr
    assert "Current thread" not in job.stderr
    message = next(line for line in job.stderr.splitlines() if "no progress" in line)
    record_row(f"SIGTERM to a process that {mode}", time.monotonic() - began, message, "exit code 143")


def test_a_long_save_is_not_cut_by_signals(tmp_path: Path, start: StartJob) -> None:
    job = start("one process", "saves", TRAINWRIGHT_GRACE_SECONDS="1")
    job.wait_for("save")
    for _ in range(2):
        job.process.send_signal(signal.SIGTERM)
        time.sleep(2)
    assert job.wait() == 75, job.stderr
    check_saved(job, tmp_path)


def test_a_child_forked_during_a_background_save_ends(start: StartJob) -> None:
    job = start("one process", "forks")
    job.wait_for("child 0")
    assert job.wait() == 0, job.stderr


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, now);
    if (id == CLOCK_REALTIME && access(getenv("TEST_JUMPED"), F_OK) == 0) now->tv_sec += 36000;
    return code;
}
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not shutil.which("cc"), reason="needs Linux and a C compiler"
)
def test_a_clock_that_jumps_by_ten_hours_changes_nothing(tmp_path: Path, start: StartJob) -> None:
    """time.time() jumps in all processes of the job, as after a correction of the machine's clock."""
    library, jumped = tmp_path / "clock.so", tmp_path / "jumped"
    settings: dict[str, Any] = {"input": CLOCK, "text": True, "check": True}
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"], **settings)
    job = start("python", "clock", LD_PRELOAD=str(library), TEST_JUMPED=str(jumped))
    job.wait_for("step 2")
    jumped.touch()
    assert job.wait() == 0, job.stderr
    job.check_nothing_left()
    assert job.stderr == ""
    record_row("the clock jumps by ten hours (two ranks)", 0.0, "none: the job continues", "exit code 0")
