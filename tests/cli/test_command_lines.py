"""A program with a TrainwrightCLI as a real command: its output, its exit code, two ranks, and resumes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from started import ROOT, Started

from trainwright.checkpoint.discovery import find_checkpoints
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.cli import stored_config

PROGRAM = str(ROOT / "tests" / "cli_program.py")
CHECKPOINTS = "trainwright_logs/version_0/checkpoints"
SETTINGS = (
    *("--model.width=6", "--seed_everything=3", "--optimizer=AdamW", "--optimizer.lr=0.05"),
    *("--lr_scheduler=CosineAnnealingLR", "--lr_scheduler.T_max=5", "--trainer.max_epochs=1"),
)

pytestmark = pytest.mark.launch


@pytest.fixture
def jobs() -> Iterator[list[Started]]:
    started: list[Started] = []
    yield started
    for each in started:
        each.close()


def run(jobs: list[Started], folder: Path, *arguments: str, code: int = 0) -> Started:
    job = Started([sys.executable, "-W", "error", PROGRAM, *arguments], folder)
    jobs.append(job)
    assert job.wait(180) == code, job.stderr
    return job


def weights(folder: Path) -> dict[str, list[float]]:
    newest = find_checkpoints(str(folder / CHECKPOINTS))[-1]
    return {name: each.tolist() for name, each in open_checkpoint(newest.path).read_tensors("model").items()}


def test_one_process_trains_and_tests(tmp_path: Path, jobs: list[Started]) -> None:
    printed = run(jobs, tmp_path, "fit", *SETTINGS, "--print_config").stdout
    (tmp_path / "printed.yaml").write_text(printed)
    run(jobs, tmp_path, "fit", "--config", "printed.yaml")
    written = (tmp_path / "trainwright_logs/version_0/config.yaml").read_text()
    assert yaml.safe_load(written) == yaml.safe_load(printed)

    resumed = run(jobs, tmp_path, "fit", "--config", "printed.yaml", "--ckpt_path", "last", "--trainer.max_epochs", "2")
    assert "resuming from" in resumed.stdout + resumed.stderr
    assert len(find_checkpoints(str(tmp_path / CHECKPOINTS))) == 2
    assert "val_loss" in run(jobs, tmp_path, "test", "--ckpt_path", "last").stdout

    (tmp_path / "printed.yaml").write_text(printed.replace("max_epochs", "max_epoch"))
    wrong = run(jobs, tmp_path, "fit", "--config", "printed.yaml", code=2)
    assert "Traceback" not in wrong.stderr
    assert "'fit.trainer' has no argument 'max_epoch'. Did you mean 'max_epochs'?" in wrong.stderr


def test_two_ranks_resume_without_other_arguments(
    tmp_path: Path, jobs: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launching process and its ranks run the same program. The resumed run ends like an uninterrupted run."""
    pair = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
    monkeypatch.setenv("TRAINWRIGHT_TRAINER_DETECT_ANOMALY", "false")
    for name in ("resumed", "whole"):
        (tmp_path / name).mkdir()
    begun = run(jobs, tmp_path / "resumed", "fit", *SETTINGS, *pair)
    assert begun.stderr.count("TRAINWRIGHT_TRAINER_DETECT_ANOMALY=false sets") == 1
    again = run(jobs, tmp_path / "resumed", "fit", "--ckpt_path", "last", "--trainer.max_epochs", "2")
    assert again.stderr.count("arguments that are not in the command come from the config in") == 1
    run(jobs, tmp_path / "whole", "fit", *SETTINGS, *pair, "--trainer.max_epochs=2")
    assert weights(tmp_path / "resumed") == weights(tmp_path / "whole")
    first, second = find_checkpoints(str(tmp_path / "resumed" / CHECKPOINTS))
    assert (first.step, second.step) == (1, 2)
    trainer = yaml.safe_load(stored_config(second.path) or "")["trainer"]
    assert (trainer["devices"], trainer["strategy"], trainer["max_epochs"]) == (2, "ddp", 2)
