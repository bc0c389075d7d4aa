"""Ranks that make no progress: the report, which names the rank that is late, the end of the job, and no false alarm."""

from __future__ import annotations

import io
import re
import threading
import time
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import deadline, wait_until
from fault_rows import record_row
from forked import run_python
from jobs import run_job
from small import QUIET, Classifier, make_loader, make_net
from started import ROOT, Started, python

import trainwright as tw
from trainwright.faults import hangs

pytestmark = pytest.mark.faults
QUICK = {**QUIET, "num_sanity_val_steps": 0, "max_epochs": 1, "limit_train_batches": 6}
LIMIT = "limit.txt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the limit that a job has: a busy machine delays every rank."""
    (tmp_path / LIMIT).write_text(str(min(deadline(2.0), 6.0)))
    return tmp_path


def record_hang(fault: str, report: str, left_behind: str) -> None:
    """Record a hang. The seconds in its report follow from the test's limit, which is 60 s for users."""
    seconds = re.search(r"Hang for (\d+) s", report)
    assert seconds is not None
    record_row(f"{fault}, with a limit of some seconds", float(seconds[1]), report, left_behind)


def set_limits(folder: Path) -> float:
    limit = float((folder / LIMIT).read_text())
    hangs.SHORTEST_LIMIT = hangs.FIRST_LIMIT = limit
    return limit


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)


class Pausing(Classifier):
    """Pauses where no rank hangs, and then, if asked to, on rank 1 only."""

    def __init__(self, pause: float, hangs: bool) -> None:
        super().__init__()
        self.pause, self.hangs = pause, hangs

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 0:
            compute(self.pause)  # as a compilation
        if batch_idx == 1:
            with self.trainer.engine.rank_zero_first():
                time.sleep(self.pause * (self.trainer.global_rank == 0))
        if batch_idx == 2:
            self.trainer.save_checkpoint("slow.ckpt")
        if batch_idx == 4:
            folder = Path(self.trainer.default_root_dir)
            wait_until(lambda: not self.hangs or self.trainer.global_rank == 0 or list(folder.glob("hang-*.txt")), 60)
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(self.pause)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.pause / 5)
        super().validation_step(batch, batch_idx)


def train_with_pauses(folder: Path) -> Any:
    limit = set_limits(folder)
    texts = []
    for hang in (False, True):
        with redirect_stderr(io.StringIO()) as written:
            trainer = tw.Trainer(**QUICK, default_root_dir=folder / str(hang))
            trainer.fit(Pausing(2 * limit if not hang else 0.0, hang), make_loader(), make_loader())
            if "Hang for" in written.getvalue():
                wait_until(lambda: "is over" in written.getvalue(), 60)
        texts.append(written.getvalue())
    return texts, "trainwright-hang-watch" in {thread.name for thread in threading.enumerate()}


def test_only_a_hang_is_reported(folder: Path) -> None:
    ranks = run_job(train_with_pauses, 2, folder)
    assert [texts[0] for texts, _ in ranks] == ["", ""]
    text = "".join(texts[1] for texts, _ in ranks)
    found = re.findall(r"Hang for \d+ s: rank 1 never came: at .*deadlines.py:\d+ in wait_until \(fit, .*", text)
    assert len(found) == text.count("Hang for") == text.count("The hang is over after") == 1, text
    assert "; rank 0: waiting in all_reduce (collective " in found[0]
    assert "hang_timeout=1800 ends it in" in text
    [file] = (folder / "True").glob("hang-*.txt")
    stacks = file.read_text()
    assert stacks.count("== rank ") == 2
    assert "in training_step" in stacks
    assert str(file) in text
    assert not any(has_thread for _, has_thread in ranks)
    record_hang("a wait in training_step of rank 1 (ddp, two ranks)", found[0], "the run continues")


class Uneven(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.01 + 0.06 * self.trainer.global_rank)
        return super().training_step(batch, batch_idx)


def train_with_a_slow_rank(folder: Path) -> str:
    hangs.SAMPLES = 8  # type: ignore[misc]
    with redirect_stderr(io.StringIO()) as written:
        settings = {**QUIET, "max_epochs": -1, "max_time": {"seconds": deadline(24)}}
        tw.Trainer(**settings).fit(Uneven(), make_loader(4000, 4))
    return written.getvalue()


def test_a_slow_rank_is_named_once(folder: Path) -> None:
    texts = run_job(train_with_a_slow_rank, 2, folder)
    lines = [line for line in "".join(texts).splitlines() if "slower" in line]
    assert len(lines) == 1, texts
    assert re.fullmatch(
        r"(\[rank0\] )?Rank 1 is slower than the others, which waited for it in \d of \d samples\.", lines[0]
    )
    record_row(
        "a rank that takes seven times as long (ddp, two ranks), by samples of 8 s", 16.0, lines[0], "the run continues"
    )


class Barred(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and self.trainer.is_global_zero:
            dist.barrier()
        return super().training_step(batch, batch_idx)


def wait_in_a_lone_barrier(folder: Path) -> None:
    limit = set_limits(folder)
    trainer = tw.Trainer(**QUICK, hang_timeout=timedelta(seconds=4 * limit), default_root_dir=folder)
    trainer.fit(Barred(), make_loader())


def generate_on_one_rank(folder: Path) -> None:
    limit = set_limits(folder)
    accelerator = tw.Accelerator(strategy="fsdp", hang_timeout=4 * limit, project_dir=folder)
    net = make_net()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), make_loader())
    for number, (inputs, targets) in enumerate(loader):
        accelerator.backward(torch.nn.functional.cross_entropy(net(inputs), targets))
        optimizer.step()
        if number == 2 and accelerator.is_main_process:
            generate(net)


def generate(net: torch.nn.Module) -> None:
    with torch.no_grad():
        for _ in range(50):
            net(torch.zeros(1, 8))


@pytest.mark.parametrize(("job", "fault", "late", "call"), [
    (wait_in_a_lone_barrier, "lone barrier on rank 0 (Trainer, ddp)", "training_step", "barrier"),
    (generate_on_one_rank, "lone generate on rank 0 (Accelerator, fsdp)", "generate", r"\w+"),
])  # fmt: skip
def test_a_lone_call_ends_the_job_after_its_timeout(job: Any, fault: str, late: str, call: str, folder: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run_job(job, 2, folder)
    text = str(caught.value)
    [report] = [line for line in text.splitlines() if line.startswith("Hang for")]
    assert re.search(rf"rank 0.* waiting in {call} \(collective \d+\) at .*test_hangs.py:\d+ in ({late})", report), text
    assert "rank 1" in report
    assert "hang_timeout=" in text
    assert len(list(folder.glob("hang-*.txt"))) == 1
    record_hang(fault, report, "the job ends after hang_timeout")


STOPPED = """
import os, signal, sys
from pathlib import Path
import trainwright as tw
from small import Classifier, QUIET, make_loader
from trainwright.faults import hangs

hangs.SHORTEST_LIMIT = hangs.FIRST_LIMIT = limit = float(sys.argv[1])

class Stopping(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.trainer.global_rank == 1 and not Path("stopped").exists():
            Path("stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)

tw.Trainer(**QUIET, max_epochs=1, hang_timeout=8 * limit).fit(Stopping(), make_loader())
print("finished", flush=True)
"""


def test_a_stopped_rank_is_named_and_replaced(folder: Path) -> None:
    (folder / "job.py").write_text(STOPPED)
    limit = (folder / LIMIT).read_text()
    options = ["--devices", "2", "--max-restarts", "1"]
    job = Started(python("-m", "trainwright", "launch", *options, "job.py", limit), folder)
    try:
        assert job.wait(180) == 0, job.stderr
        job.check_nothing_left()
    finally:
        job.close()
    assert job.stdout.count("finished") == 2
    assert job.stderr.count("Hang for") - job.stderr.count("ends the job. Hang for") == 1, job.stderr
    [named] = re.findall(r"rank 1 of 2 failed first \(hang_timeout=.*", job.stderr)
    assert "rank 1 never came: it is stopped (SIGSTOP)" in named
    stacks = next(folder.glob("hang-*.txt")).read_text()
    assert "_engine_run_backward" in stacks
    assert "py-spy" in stacks
    record_hang("SIGSTOP of rank 1 (ddp, two ranks)", named, "restarted by --max-restarts")


def test_a_single_process_is_watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = float((folder / LIMIT).read_text())
    monkeypatch.setattr(hangs, "FIRST_LIMIT", limit)
    monkeypatch.setattr(hangs, "SHORTEST_LIMIT", limit)
    monkeypatch.setattr(hangs, "BUSY_FACTOR", 1.0)
    written = io.StringIO()

    class Slow(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 1:
                wait_until(lambda: "batch 1, training_step" in written.getvalue(), 60)
            if batch_idx == 3:
                wait_until(lambda: compute(0.1) or "still computes" in written.getvalue(), 60)
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                wait_until(lambda: "The hang is over after" in written.getvalue(), 60)

    with redirect_stderr(written):
        settings: Any = {**QUICK, "devices": 1, "hang_timeout": 600.0, "default_root_dir": folder}
        tw.Trainer(**settings | {"limit_train_batches": 3}).fit(Slow(), make_loader())
        tw.Trainer(**settings | {"hang_timeout": 4 * limit}).fit(Slow(), make_loader())
    text = written.getvalue()
    assert re.search(
        r"Hang for \d+ s: rank 0 made no progress, at .*:\d+ in .* \(fit, epoch 0, batch 1, training_step\)", text
    )
    assert re.search(
        r"Hang for .*compute.* Rank 0 still computes, so hang_timeout=[\d.]+ does not end the job", text
    ), text
    assert "trainwright-hang-watch" not in {thread.name for thread in threading.enumerate()}


ALONE = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "tests")!r})
import trainwright as tw
from small import Classifier, QUIET, make_loader

class Sleeping(Classifier):
    def training_step(self, batch, batch_idx):
        time.sleep(1000)

tw.Trainer(**QUIET, devices=1, max_epochs=1, hang_timeout=4).fit(Sleeping(), make_loader())
"""


def test_a_single_process_ends_after_its_timeout(tmp_path: Path) -> None:
    done = run_python("-c", ALONE, folder=tmp_path)
    assert done.returncode == 1
    assert re.search(
        r"hang_timeout=4 ends the job. Hang for \d+ s: .* in training_step .* The process ends.", done.stderr
    )


@pytest.mark.parametrize("kind", [tw.Trainer, tw.Accelerator])
@pytest.mark.parametrize("value", [0, -5, float("nan"), float("inf"), timedelta(0), "15 minutes", True])
def test_a_hang_timeout_has_to_be_positive(kind: Any, value: Any) -> None:
    words = (
        r"is not accepted. Pass seconds"
        if value in ("15 minutes", True)
        else "is not above 0 and finite. Pass seconds, such as 900"
    )
    with pytest.raises((ValueError, TypeError), match=rf"hang_timeout={re.escape(repr(value))} {words}"):
        kind(hang_timeout=value)
