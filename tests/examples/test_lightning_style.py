"""A script in the style of Lightning runs after a change of its import lines, with the same results."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest
from interpreters import run_command

SCRIPT = Path(__file__).with_name("lightning_style.py")
METRICS = (
    "epochs_done lr train_acc train_loss train_loss_epoch train_loss_step val_acc_clean val_acc_noisy val_loss_clean "
    "val_loss_noisy"
)


@pytest.mark.launch
def test_the_script_runs_as_it_is(tmp_path: Path) -> None:
    program = SCRIPT.read_text()
    imported = re.findall(r"^(?:from|import) trainwright.*$", program, re.MULTILINE)
    assert imported[0] == "import trainwright as L"
    assert all(
        line.startswith(("from trainwright.callbacks import ", "from trainwright.loggers import "))
        for line in imported[1:]
    )
    assert program.count("trainwright") == len(imported)
    command = [sys.executable, "-W", "error", str(SCRIPT), "logs"]
    done = run_command(command, folder=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    said = dict(re.findall(r"^([a-z_-]+(?: [a-z]+)*): (.*)$", done.stdout, re.MULTILINE))
    assert float(said["test_acc"]) > 0.9
    epochs, finished = map(int, said["epochs"].split())
    assert 5 <= epochs == finished < 30
    assert said["stopped early"] == "True"
    assert said["predictions"] == "128"
    assert said["hyper-parameters"] == "0.01 16 32"
    assert said["loaded as it was"] == "True"
    assert said["checkpoints"] == "2 epoch="
    assert said["metrics"] == METRICS
    assert re.search(r"test_loss +0\.", done.stdout)

    folder = tmp_path / "logs/csv/version_0"
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    rates = [float(row["lr"]) for row in rows if row["lr"]]
    assert rates[0] < 0.1 == max(rates)  # the warm-up
    assert [row["test_acc"] for row in rows if row["test_acc"]]
    assert len([row for row in rows if row["val_loss_noisy"]]) == epochs
    assert len(list((folder / "checkpoints").glob("*/manifest.json"))) in (2, 3)
    assert list((tmp_path / "logs/tb/version_0").glob("events.out.tfevents.*"))
