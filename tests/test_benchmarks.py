"""The benchmarks run, and their tables have a line per implementation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from forked import run_python
from interpreters import run_command

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def run(*arguments: str, script: str = "strategies.py") -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, FOLDER / script, *arguments], seconds=220)


@pytest.mark.slow
def test_strategies_are_compared_with_hand_written_ones() -> None:
    names = ("--strategies", "fsdp", "--loops", "by_hand,trainwright")
    done = run("--small", "--rounds", "1", "--steps", "2", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("fsdp")]
    assert [tuple(row[:2]) for row in rows] == [("fsdp", "by_hand"), ("fsdp", "trainwright")]
    for row in rows:
        milliseconds, *_, peak, optimizer, budget = map(float, row[2:])
        assert milliseconds > 0
        assert peak > optimizer
        assert 0 < optimizer <= budget


@pytest.mark.slow
def test_steps_are_compared_with_hand_written_ones() -> None:
    names = ["hand_written", "trainwright_trainer", "trainwright_accelerator", "trainwright_accelerator_out_of_the_box"]
    done = run_python(FOLDER / "overhead.py", "--rounds", "1", "--steps", "2", "--only", ",".join(names))
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("hand", "train"))]
    assert [row[0] for row in rows] == names
    assert [row[3] for row in rows[1:]] == ["1.07", "1.03", "0.75"]
    done = run("--rounds", "1", "--steps", "2", script="ddp_overhead.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(
        re.findall(r"^(hand-written, fused|hand-written|Trainer|Accelerator) +(.*)", done.stdout, re.MULTILINE)
    )
    assert [len(row.split()) for row in found.values()] == [5, 5, 6, 6]
    assert {found[name].split()[3] for name in ("Trainer", "Accelerator")} == {"1.03"}


@pytest.mark.slow
def test_ragged_text_is_compared_with_padding_by_hand() -> None:
    done = run("--small", script="ragged.py")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[:2] for row in rows] == [["reviews", "seconds"], ["documents", "tokens/s"]]
    assert all(float(figure) > 0 for row in rows for figure in row[2:5])


@pytest.mark.slow
def test_real_models_are_compared_with_loops_by_hand() -> None:
    options = ("--rounds", "1", "--steps", "1", "--cases", "transformer,resnet", "--loops", "by_hand,trainwright")
    done = run(*options, script="models.py")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        [f"`{case}`", loop] for case in ("transformer", "resnet") for loop in ("by hand", "trainwright")
    ]
    assert all(float(row[2].replace(",", "")) > 0 for row in rows)


@pytest.mark.slow
def test_starts_are_compared_with_a_hand_written_one() -> None:
    names = ["hand_written", "trainwright_trainer"]
    done = run("--rounds", "1", "--only", ",".join(names), script="start.py")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("hand", "train"))]
    assert [row[0] for row in rows] == names
    assert all(float(figure) > 0 for row in rows for figure in row[1:])
    refused = run("--only", "trainwright_trainer", script="start.py")
    assert refused.returncode == 2
    assert "--only takes hand_written, for the ratios" in refused.stderr


@pytest.mark.slow
def test_a_script_is_compared_with_lightning() -> None:
    done = run("--rounds", "1", "--", "--reviews", "1800", "--epochs", "1", script="imdb.py")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row[1]: row for row in map(str.split, done.stdout.splitlines()) if row[0] == "32-true"}
    if "lightning is not installed" in done.stdout:
        assert list(rows) == ["trainwright"]
    else:
        assert list(rows) == ["trainwright", "lightning"]
    for row in rows.values():
        assert all(float(figure) > 0 for figure in row[2:])
        assert float(row[7]) > 57  # of 360 reviews: the frameworks begin with the same weights, and shuffle differently


def test_the_benchmark_rejects_an_unknown_strategy() -> None:
    done = run_python(FOLDER / "strategies.py", "--strategies", "ddp,fdsp")
    assert done.returncode == 2
    assert "'fdsp' is unknown here; choose from ddp, ddp_sharded, fsdp, deepspeed_stage_1" in done.stderr


@pytest.mark.slow
def test_checkpoints_are_compared_with_the_bare_work() -> None:
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


@pytest.mark.slow
def test_the_scale_benchmark_prints_every_measurement(tmp_path: Path) -> None:
    sizes = ("--ranks", "2,70", "--tensors", "50", "--checkpoints", "5", "--rounds", "1")
    done = run(*sizes, "--picture", str(tmp_path / "scale.svg"), script="scale.py")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = ("agreement", "stop", "watch", "commit", "the indices of a batch", "the indices of an epoch's last batch")
    names = [f"{count} ranks: {part}" for count in (2, 70) for part in parts]
    names += ["open a checkpoint of 50 tensors", "find the newest of 5 checkpoints"]
    rows = re.findall(r"^(.*?) +([\d.]+) ms \(", done.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == names
    assert all(float(figure) > 0 for _, figure in rows)
    picture = ElementTree.parse(tmp_path / "scale.svg").getroot()
    assert sum(each.tag.endswith("circle") for each in picture.iter()) == 2 * 4 * 4
