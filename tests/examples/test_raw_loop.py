"""The examples of examples/raw_loop are the base script plus one feature, and they run."""

from __future__ import annotations

import contextlib
import csv
import difflib
import io
import os
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from forked import run_python
from jobs import run_job
from small import ON_HOST

FOLDER = Path(__file__).parents[2] / "examples" / "raw_loop"
MOST_CHANGES = {
    "gradient_accumulation": (2, 3), "multi_process_metrics": (1, 1), "checkpointing": (3, 10), "tracking": (1, 5),
    "early_stopping": (0, 8), "profiler": (2, 11), "local_sgd": (5, 14), "batch_size": (4, 9),
    "cross_validation": (2, 9), "gan": (19, 29),
}  # fmt: skip
"""By example: the numbers of removed and added lines of the base, without docstrings and indentation."""


def lines_of(name: str) -> list[str]:
    text = (FOLDER / f"{name}.py").read_text()
    text = re.sub(r'\A""".*?"""', "", text, flags=re.DOTALL)
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_every_example_is_compared() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {"plain", "base", *MOST_CHANGES}


@pytest.mark.parametrize("name", MOST_CHANGES)
def test_an_example_is_the_base_and_one_feature(name: str) -> None:
    changes = [line for line in difflib.ndiff(lines_of("base"), lines_of(name)) if line[0] in "+-"]
    removed, added = (sum(line[0] == sign for line in changes) for sign in "-+")
    assert removed <= MOST_CHANGES[name][0], "\n".join(changes)
    assert 0 < added <= MOST_CHANGES[name][1], "\n".join(changes)


def test_the_base_is_the_plain_loop_with_few_changes() -> None:
    changes = [line for line in difflib.ndiff(lines_of("plain"), lines_of("base")) if line[0] in "+-"]
    assert [sum(line[0] == sign for line in changes) for sign in "-+"] == [8, 9], "\n".join(changes)
    plain = (FOLDER / "plain.py").read_text()
    assert not re.findall("trainwright|accelerator", plain.partition('"""\n\n')[2])


def run(name: str, folder: Path, *arguments: str) -> str:
    done = run_python(FOLDER / f"{name}.py", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracies(output: str) -> list[float]:
    return [float(each) for each in re.findall(r"^epoch \d+: val_acc (.*)$", output, re.MULTILINE)]


LATER = [pytest.param(name, marks=pytest.mark.launch) for name in ("multi_process_metrics", "local_sgd")]


@pytest.mark.parametrize("name", ["plain", "base", "profiler", *LATER])
def test_examples_that_train_as_the_base_does(tmp_path: Path, name: str) -> None:
    output = run(name, tmp_path)
    found = accuracies(output)
    assert len(found) == 5
    assert found[-1] > 0.95
    if name == "profiler":
        assert "Self CPU" in output
        assert [each.name for each in (tmp_path / "runs/profile").iterdir()] == ["profile-0.json"]


def test_the_early_stopping_example_stops(tmp_path: Path) -> None:
    assert len(accuracies(run("early_stopping", tmp_path))) < 5


def test_the_accumulation_example_is_trained(tmp_path: Path) -> None:
    assert accuracies(run("gradient_accumulation", tmp_path))[-1] > 0.7


@pytest.mark.launch
def test_the_cross_validation_example_has_a_mean(tmp_path: Path) -> None:
    output = run("cross_validation", tmp_path)
    assert len(accuracies(output)) == 15
    assert float(re.findall(r"mean val_acc (.*)", output)[0]) > 0.9


@pytest.mark.launch
def test_the_raw_gan_is_trained(tmp_path: Path) -> None:
    distances = [float(each) for each in re.findall(r"distance to the points (.*)", run("gan", tmp_path))]
    assert len(distances) == 5
    assert distances[-1] < distances[0]
    assert distances[-1] < 0.25


def test_the_checkpointing_example_resumes(tmp_path: Path) -> None:
    first = run("checkpointing", tmp_path)
    folder = tmp_path / "runs/checkpointing/checkpoints"
    *_, newest = sorted(folder.iterdir())
    assert len(list(folder.iterdir())) == 2
    shutil.rmtree(newest)
    assert accuracies(run("checkpointing", tmp_path, "--resume")) == accuracies(first)[-1:]


def test_the_tracking_example_writes_files(tmp_path: Path) -> None:
    accuracy = accuracies(run("tracking", tmp_path))
    (path,) = (tmp_path / "runs/tracking").rglob("metrics.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [round(float(row["val_acc"]), 4) for row in rows if row["val_acc"]] == accuracy
    assert len([row for row in rows if row["loss"]]) == 5 * 29


@contextlib.contextmanager
def memory_for(samples: int) -> Iterator[None]:
    """Let memory run out where a loss of more samples than these is computed."""
    whole = torch.nn.functional.cross_entropy

    def limited(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(targets) > samples:
            raise torch.OutOfMemoryError(f"no memory for {len(targets)} samples")
        return whole(inputs, targets)

    with mock.patch.object(torch.nn.functional, "cross_entropy", limited):
        yield


def run_here(name: str, *arguments: str) -> str:
    """Run an example in this process, and return its output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, mock.patch.object(sys, "argv", [name, *arguments]):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


def check_sizes(output: str) -> None:
    """Check that batches of 32 and three smaller sizes were too large, and that the next size was trained with."""
    assert re.findall(r"batch size (\d+)", output) == ["32", "28", "25", "22", "19"]
    found = accuracies(output)
    assert len(found) == 5
    assert found[-1] > 0.9


@pytest.mark.skipif(not ON_HOST, reason="computes on the CPU")
def test_a_smaller_batch_size_is_taken_when_memory_runs_out() -> None:
    with memory_for(20):
        check_sizes(run_here("batch_size"))


def on_two(folder: Path) -> dict[str, Any]:
    """Run every example on this rank, in one job, and return the outputs."""
    outputs = {name: run_here(name) for name in ("base", *MOST_CHANGES) if name != "batch_size"}
    if os.environ["RANK"] == "0":  # before the collectives of the next example
        shutil.rmtree(sorted((folder / "runs/checkpointing/checkpoints").iterdir())[-1])
    with memory_for(20):
        outputs["batch_size"] = run_here("batch_size")
    outputs["resumed"] = run_here("checkpointing", "--resume")
    return outputs


@pytest.mark.slow
def test_examples_run_on_two_processes(tmp_path: Path) -> None:
    outputs, others = run_job(on_two, 2, tmp_path)
    assert set(outputs) == {"base", *MOST_CHANGES, "resumed"}
    assert not any(others.values()), "rank 0 alone prints"
    check_sizes(outputs.pop("batch_size"))
    found = {name: accuracies(output) for name, output in outputs.items()}
    lowest = {"local_sgd": 0.85, "gradient_accumulation": 0.6}
    for name in ("base", "multi_process_metrics", "checkpointing", "tracking", "profiler", *lowest):
        assert len(found[name]) == 5
        assert found[name][-1] > lowest.get(name, 0.9), name
    for name in ("multi_process_metrics", "checkpointing", "tracking", "profiler"):
        assert found[name] == found["base"], name
    assert found["resumed"] == found["checkpointing"][-1:]
    assert 0 < len(found["early_stopping"]) < 5
    assert len(found["cross_validation"]) == 15
    distances = re.findall(r"distance to the points (.*)", outputs["gan"])
    assert len(distances) == 5
    assert {each.name for each in (tmp_path / "runs/profile").iterdir()} == {"profile-0.json", "profile-1.json"}
    (path,) = (tmp_path / "runs/tracking").rglob("metrics.csv")
    assert len([row for row in csv.DictReader(path.read_text().splitlines()) if row["loss"]]) == 5 * 15
