"""Scripts of the kind that people have written for Accelerate run after a change of their import lines, with the same metrics.

`wild/recorded.json` holds what Accelerate computed. To record it again, in an environment that has accelerate and transformers:

    python tests/raw_loop/test_wild.py
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from deadlines import deadline

FOLDER = Path(__file__).with_name("wild")
RECORDED = FOLDER / "recorded.json"
RUNS: dict[str, list[list[str]]] = {
    "text_classifier": [["--cpu"]],
    "mid_epoch_resume": [
        ["--checkpointing_steps", "7", "--stop_after", "16"],
        ["--resume_from_checkpoint", "checkpoints/step_14"],
    ],
    "gradient_accumulation": [[]],
    "early_stopping": [[]],
    "tracking": [[]],
}
"""The arguments of each script's runs, one after another in one folder."""
TOLERANCE = {"tracking": 0.1}
"""The shuffled one has another order of the data in each library."""
EXACT = 5e-5
ON_TWO = "gradient_accumulation on 2 processes"
HEAVY = pytest.param("text_classifier", marks=pytest.mark.slow)  # imports transformers, which takes seconds


def metrics_of(output: str, folder: Path) -> dict[str, float]:
    """Return what a script has printed as "name: number", and the scalars in TensorBoard's files."""
    found = {name: float(value) for name, value in re.findall(r"^([\w ]+): (-?\d[\d.e+-]*)$", output, re.MULTILINE)}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tensor.float_val and value.tag != "hp_metric":  # ours adds that for the table of settings
                    found[f"{value.tag} at {event.step}"] = value.tensor.float_val[0]
    return found


def converted(name: str) -> str:
    """Return a script for our library: only the lines that import from Accelerate name another package."""
    return re.sub(r"^from accelerate(\.utils)? import", r"from trainwright\1 import", source(name), flags=re.MULTILINE)


def source(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text()


def run_script(program: str, runs: list[list[str]], folder: Path, *starter: str) -> dict[str, float]:
    script = folder / "script.py"
    script.write_text(program)
    output = ""
    for arguments in runs:
        done = subprocess.run(
            [sys.executable, *starter, str(script), *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "LOGLEVEL": "ERROR"},
            capture_output=True,
            text=True,
            timeout=deadline(600),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        output += done.stdout
    return metrics_of(output, folder)


def check(ours: dict[str, float], theirs: dict[str, float], tolerance: float) -> None:
    assert sorted(ours) == sorted(theirs)
    for name, value in theirs.items():
        allowed = 0.0 if value == int(value) and "accuracy" not in name else tolerance
        assert ours[name] == pytest.approx(value, rel=max(allowed, 1e-7), abs=tolerance), name


def recorded(name: str) -> dict[str, float]:
    found: dict[str, float] = json.loads(RECORDED.read_text())[name]
    return found


@pytest.mark.parametrize("name", RUNS)
def test_only_import_lines_change(name: str) -> None:
    before, after = source(name).splitlines(), converted(name).splitlines()
    changed = [line for line, other in zip(before, after, strict=True) if line != other]
    assert changed
    assert all(line.startswith(("from accelerate import ", "from accelerate.utils import ")) for line in changed)
    assert "accelerate " not in "\n".join(after).replace("for Accelerate", "")


@pytest.mark.parametrize("name", [HEAVY, *(name for name in RUNS if name != "text_classifier")])
def test_the_metrics_are_those_that_accelerate_computed(tmp_path: Path, name: str) -> None:
    from forked import run_python

    if name == "text_classifier":
        pytest.importorskip("transformers")
        ours = run_script(converted(name), RUNS[name], tmp_path)
    else:
        (tmp_path / "script.py").write_text(converted(name))
        output = ""
        for arguments in RUNS[name]:
            done = run_python("script.py", *arguments, folder=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr
            output += done.stdout
        ours = metrics_of(output, tmp_path)
    check(ours, recorded(name), TOLERANCE.get(name, EXACT))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_accelerate_computes_the_same_metrics(tmp_path: Path, name: str) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    (tmp_path / "theirs").mkdir()
    theirs = run_script(source(name), RUNS[name], tmp_path / "theirs")
    check(theirs, recorded(name), EXACT)
    (tmp_path / "ours").mkdir()
    check(run_script(converted(name), RUNS[name], tmp_path / "ours"), theirs, TOLERANCE.get(name, EXACT))


@pytest.mark.slow
def test_two_processes_compute_what_accelerate_computed(tmp_path: Path) -> None:
    check(run_on_two(converted("gradient_accumulation"), tmp_path), recorded(ON_TWO), EXACT)


def run_on_two(program: str, folder: Path) -> dict[str, float]:
    return run_script(program, [[]], folder, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def record() -> None:
    """Run each script under Accelerate and write its metrics."""
    figures: dict[str, Any] = {
        "versions": {name: importlib.metadata.version(name) for name in ("accelerate", "transformers", "torch")}
    }
    for name, runs in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = run_script(source(name), runs, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        figures[ON_TWO] = run_on_two(source("gradient_accumulation"), Path(folder))
    RECORDED.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    record()
