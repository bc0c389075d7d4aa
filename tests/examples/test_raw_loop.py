"""The examples of examples/raw_loop: each is the base script plus one feature, and each runs."""

from __future__ import annotations

import csv
import difflib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import deadline
from forked import run_python

FOLDER = Path(__file__).parents[2] / "examples" / "raw_loop"
MOST_CHANGES = {
    "gradient_accumulation": (2, 3),
    "multi_process_metrics": (1, 1),
    "checkpointing": (3, 9),
    "tracking": (1, 5),
    "early_stopping": (0, 7),
    "profiler": (2, 11),
    "local_sgd": (1, 3),
    "batch_size": (4, 9),
    "cross_validation": (2, 9),
    "gan": (19, 29),
}
"""By example: how many lines of the base it leaves out, and how many it adds, apart from its docstring and indentation."""


def lines_of(name: str) -> list[str]:
    text = (FOLDER / f"{name}.py").read_text()
    text = re.sub(r'\A""".*?"""', "", text, flags=re.DOTALL)
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_every_example_is_compared() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {"base", *MOST_CHANGES}


@pytest.mark.parametrize("name", MOST_CHANGES)
def test_an_example_is_the_base_and_one_feature(name: str) -> None:
    changes = [line for line in difflib.ndiff(lines_of("base"), lines_of(name)) if line[0] in "+-"]
    removed, added = (sum(line[0] == sign for line in changes) for sign in "-+")
    assert removed <= MOST_CHANGES[name][0], "\n".join(changes)
    assert 0 < added <= MOST_CHANGES[name][1], "\n".join(changes)


def run(name: str, folder: Path, *arguments: str) -> str:
    done = run_python(FOLDER / f"{name}.py", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracies(output: str) -> list[float]:
    return [float(each) for each in re.findall(r"^epoch \d+: val_acc (.*)$", output, re.MULTILINE)]


LATER = [pytest.param(name, marks=pytest.mark.launch) for name in ("multi_process_metrics", "local_sgd", "batch_size")]


@pytest.mark.parametrize("name", ["base", "profiler", *LATER])
def test_examples_that_train_as_the_base_does(tmp_path: Path, name: str) -> None:
    output = run(name, tmp_path)
    found = accuracies(output)
    assert len(found) == 5
    assert found[-1] > 0.95
    if name == "profiler":
        assert "Self CPU" in output
        assert [each.name for each in (tmp_path / "runs/profile").iterdir()] == ["profile-0.json"]


def test_early_stopping(tmp_path: Path) -> None:
    assert len(accuracies(run("early_stopping", tmp_path))) < 5


def test_gradient_accumulation(tmp_path: Path) -> None:
    assert accuracies(run("gradient_accumulation", tmp_path))[-1] > 0.7


@pytest.mark.launch
def test_cross_validation(tmp_path: Path) -> None:
    output = run("cross_validation", tmp_path)
    assert len(accuracies(output)) == 15
    assert float(re.findall(r"mean val_acc (.*)", output)[0]) > 0.9


@pytest.mark.launch
def test_gan(tmp_path: Path) -> None:
    distances = [float(each) for each in re.findall(r"distance to the points (.*)", run("gan", tmp_path))]
    assert len(distances) == 5
    assert distances[-1] < distances[0]
    assert distances[-1] < 0.25


def test_checkpointing(tmp_path: Path) -> None:
    first = run("checkpointing", tmp_path)
    folder = tmp_path / "runs/checkpointing/checkpoints"
    *_, newest = sorted(folder.iterdir())
    assert len(list(folder.iterdir())) == 2
    shutil.rmtree(newest)
    assert accuracies(run("checkpointing", tmp_path, "--resume")) == accuracies(first)[-1:]


def test_tracking(tmp_path: Path) -> None:
    accuracy = accuracies(run("tracking", tmp_path))
    (path,) = (tmp_path / "runs/tracking").rglob("metrics.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [round(float(row["val_acc"]), 4) for row in rows if row["val_acc"]] == accuracy
    assert len([row for row in rows if row["loss"]]) == 5 * 29


@pytest.mark.slow
@pytest.mark.parametrize("name", ["base", "multi_process_metrics", "local_sgd", "checkpointing", "tracking"])
def test_examples_on_two_processes(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "trainwright", "launch", "--cpu", "--devices", "2", str(FOLDER / f"{name}.py")]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parents[1])}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=deadline(120), check=False
    )
    assert done.returncode == 0, done.stderr
    found = accuracies(done.stdout)
    assert len(found) == 5
    assert found[-1] > (0.85 if name == "local_sgd" else 0.93)
