"""The benchmark for a GPU runs on the present accelerator and gets all its answers."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch
from interpreters import run_command

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
CASES = ("distilbert-12-ragged-16-mixed",)
NAMES = ("by_hand", "trainwright", "trainwright_raw")


@pytest.mark.timeout(260)
def test_loops_wait_no_more_than_the_loop_by_hand(device: torch.device, tmp_path: Path) -> None:
    chosen = ("--cases", ",".join(CASES), "--implementations", ",".join(NAMES), "--out", str(tmp_path))
    limits = ("--minutes", "4", "--visits", "1", "--rounds", "1")
    command = [sys.executable, SCRIPT, "--device", device.type, "--small", *chosen, *limits]
    done = run_command(command, seconds=250)
    assert done.returncode == 0, done.stdout + done.stderr
    with open(tmp_path / "table.csv", newline="") as stream:
        rows = {(row["case"], row["implementation"]): row for row in csv.DictReader(stream)}
    assert set(rows) == {(case, name) for case in CASES for name in NAMES}, done.stdout
    for (case, name), row in rows.items():
        assert row["note"] == "", (case, name)
        assert row["is_loss_off"] == "False", (case, name)
        assert float(row["peak_mib"]) > 0, (case, name)
        assert float(row["syncs"]) <= float(rows[case, "by_hand"]["syncs"]), (case, name)
    assert float(rows["distilbert-12-ragged-16-mixed", "by_hand"]["syncs"]) >= 1  # the scaler's read in every step
