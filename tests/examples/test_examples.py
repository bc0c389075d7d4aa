"""The examples and the README's program: a command in an empty folder, as a reader would run it, and on forked ranks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
from forked import interpret, run_ranks
from interpreters import run_command

ROOT = Path(__file__).parents[2]
has_compiler = shutil.which("g++") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()


def run(*arguments: str, folder: Path, seconds: float = 200.0) -> str:
    """Run python with these arguments in a folder and return its output. A failure shows the whole output."""
    done = run_command([sys.executable, *arguments], folder=folder, seconds=seconds)
    assert done.returncode == 0, f"it ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def train_on_rank(script: str, arguments: list[str]) -> None:
    with open(f"said-{os.environ['RANK']}.txt", "w") as output, contextlib.redirect_stdout(output):
        interpret([script, *arguments])


def run_forked(script: str, options: str, folder: Path) -> str:
    """Run an example on the ranks of its options, and return the output of rank 0."""
    arguments = options.split()
    ranks = int(arguments[arguments.index("--devices") + 1]) if "--devices" in arguments else 1
    run_ranks(train_on_rank, (str(ROOT / "examples" / script), arguments), ranks, folder, 200.0)
    outputs = [(folder / f"said-{rank}.txt").read_text() for rank in range(ranks)]
    assert not any(outputs[1:]), "rank 0 alone prints"
    return outputs[0]


def said(output: str, name: str) -> str:
    """Return the value after a name in the output. Only rank 0 prints it, once."""
    found: list[str] = re.findall(rf"^{name}: (.*)$", output, re.MULTILINE)
    assert len(found) == 1, output
    return found[0]


def check_files(output: str, folder: Path) -> None:
    assert (folder / said(output, "checkpoint") / "manifest.json").is_file()
    header, *rows = (folder / said(output, "metrics")).read_text().splitlines()
    assert {"step", "epoch", "train_loss", "train_acc", "val_loss", "val_acc", "test_acc"} == set(header.split(","))
    assert len(rows) > 3
    picture = (folder / said(output, "picture")).read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 10_000


@pytest.mark.launch
def test_digits_runs_for_an_epoch_as_a_command(tmp_path: Path) -> None:
    output = run(str(ROOT / "examples/digits.py"), "--epochs", "1", "--precision", "16-mixed", folder=tmp_path)
    assert float(said(output, "test_acc")) > 0.3
    check_files(output, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    "--devices 2 --precision bf16-mixed",
    pytest.param("--compile", marks=pytest.mark.skipif(not has_compiler, reason="torch.compile needs g++, Python.h")),
])  # fmt: skip
def test_digits_reaches_its_accuracy(tmp_path: Path, options: str) -> None:
    output = run_forked("digits.py", options, tmp_path)
    assert float(said(output, "test_acc")) >= 0.97
    check_files(output, tmp_path)
    assert sorted(path.name for path in (tmp_path / "runs/trainwright_logs").iterdir()) == ["version_0"]


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--devices 2 --mixed-precision bf16 --accumulate 2"])
def test_the_raw_loop_reaches_its_accuracy(tmp_path: Path, options: str) -> None:
    output = run_forked("raw_loop.py", options, tmp_path)
    assert float(said(output, "test_acc")) >= 0.97
    assert (tmp_path / said(output, "checkpoint") / "manifest.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--epochs 4", "--epochs 8 --devices 2"])
def test_the_gan_covers_its_modes(tmp_path: Path, options: str) -> None:
    output = run_forked("gan.py", options, tmp_path)
    assert float(said(output, "distance")) < 0.25 < 1.0 < float(said(output, "distance before"))
    assert float(said(output, "coverage")) > 0.8
    assert int(said(output, "steps")) == 2 * 128 * int(options.split()[1])  # a count per optimizer


@pytest.mark.launch
@pytest.mark.parametrize("devices", ["devices=1", pytest.param("devices=2", marks=pytest.mark.slow)])
def test_the_program_of_the_readme_works(tmp_path: Path, devices: str) -> None:
    """The printed program works, and with two devices after the one change that the README promises."""
    program = re.search(r"A complete program:\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "devices=1" in program[1]
    (tmp_path / "train.py").write_text(program[1].replace("devices=1", devices))
    output = run("train.py", folder=tmp_path)
    assert float(said(output, "accuracy")) > 0.96
    header, *_, last = (tmp_path / "trainwright_logs/version_0/metrics.csv").read_text().splitlines()
    assert header == "step,epoch,val_acc"
    assert float(last.rsplit(",", 1)[1]) > 0.95
    assert len(list((tmp_path / "trainwright_logs/version_0/checkpoints").glob("*.ckpt/manifest.json"))) == 1
