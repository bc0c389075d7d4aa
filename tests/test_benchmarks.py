"""The benchmarks run, and their tables have a line for each way."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def run(*arguments: str, script: str = "strategies.py") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        capture_output=True,
        text=True,
        timeout=220,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_strategies_beside_hand_written_ones() -> None:
    names = ("--strategies", "ddp,fsdp", "--loops", "by_hand,trainwright")
    done = run("--small", "--rounds", "1", "--steps", "2", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("ddp", "fsdp"))]
    loops = [(strategy, loop) for strategy in ("ddp", "fsdp") for loop in ("by_hand", "trainwright")]
    assert [tuple(row[:2]) for row in rows] == loops
    for row in rows:
        milliseconds, *_, peak, optimizer, budget = map(float, row[2:])
        assert milliseconds > 0
        assert peak > optimizer
        assert 0 < optimizer <= budget


def test_unknown_strategy_is_refused() -> None:
    done = run("--strategies", "ddp,fdsp")
    assert done.returncode == 2
    assert "'fdsp' is unknown here; choose from ddp, ddp_sharded, fsdp, deepspeed_stage_1" in done.stderr


@pytest.mark.slow
def test_checkpoints_beside_the_bare_work() -> None:
    done = run("--small", "--rounds", "2", "--steps", "3", "--without-lightning", script="checkpoint.py")
    assert done.returncode == 0, done.stdout + done.stderr
    saves = ["bare", "trainwright", "trainwright, background", "DCP", "DCP, async_save"]
    runs = ["ModelCheckpoint, async_save", "ModelCheckpoint"]
    rows = [(line[:28].strip(), line[28:].split()) for line in done.stdout.splitlines() if len(line) > 28]
    tables = [saves, ["torch.save"], ["verify, one rank"], runs, saves, ["verify, one rank"], runs]
    names = [name for table in tables for name in table]
    found = [(name, cells) for name, cells in rows if name in names]
    assert [name for name, _ in found] == names
    for name, cells in found:
        assert float(cells[0]) > 0, name
        assert float(cells[2]) > 0, name


def test_a_number_of_ranks_is_checked() -> None:
    done = run("--ranks", "1,two", script="checkpoint.py")
    assert done.returncode == 2
    assert "--ranks 1,two: numbers of processes, such as 1,2" in done.stderr


def rows_of(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with open(folder / "table.csv", newline="") as stream:
        return {(row["case"], row["implementation"]): row for row in csv.DictReader(stream)}


@pytest.mark.slow
def test_a_gpu_is_measured_beside_the_loop_by_hand(tmp_path: Path) -> None:
    cases = ["mlp", "resnet", "save", "start", "distilbert-12-ragged-bf16-mixed"]
    names = [
        "by_hand",
        "by_hand_fused",
        "trainwright",
        "trainwright_default",
        "trainwright_raw",
        "trainwright_background",
    ]
    arguments = ("--device", "cpu", "--small", "--minutes", "3", "--rounds", "2", "--out", str(tmp_path))
    arguments += ("--cases", ",".join(cases), "--implementations", ",".join(names), "--visits", "1")
    done = run(*arguments, script="gpu.py")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path)
    of_loops = [name for name in names if name != "trainwright_background"]
    expected = {(case, name) for case in cases for name in of_loops if case not in ("save", "start")}
    expected |= {("save", name) for name in ("by_hand", "trainwright", "trainwright_background")}
    expected |= {("start", name) for name in ("by_hand", "trainwright", "trainwright_raw")}
    assert set(rows) == expected, done.stdout
    for key, row in rows.items():
        assert row["note"] == "", key
        assert row["rounds"] == "2", key
        assert float(row["ratio"]) > 0, key
        assert row["is_loss_off"] == "False", key
    assert float(rows["save", "trainwright_background"]["committed_ms"]) > float(
        rows["save", "trainwright_background"]["ms"]
    )
    table = (tmp_path / "table.md").read_text()
    assert "| `mlp` | trainwright `Trainer`, same flags | 2 |" in table
    assert (tmp_path / "ratios.png").exists() or (tmp_path / "ratios.svg").exists()
