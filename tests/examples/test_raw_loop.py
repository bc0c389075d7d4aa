"""The examples of examples/raw_loop: each is the base script plus one feature, and each runs."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest
from forked import run_python

FOLDER = Path(__file__).parents[2] / "examples" / "raw_loop"
MOST_CHANGES = {
    "gradient_accumulation": (2, 4),
    "multi_process_metrics": (1, 1),
    "checkpointing": (3, 10),
    "tracking": (1, 6),
    "early_stopping": (0, 7),
    "profiler": (3, 14),
    "local_sgd": (1, 3),
    "batch_size": (3, 10),
    "cross_validation": (3, 10),
    "gan": (29, 42),
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
    assert (removed, added) <= MOST_CHANGES[name], "\n".join(changes)
    assert removed <= MOST_CHANGES[name][0], "\n".join(changes)
    assert added <= MOST_CHANGES[name][1], "\n".join(changes)
    assert added > 0


def run(name: str, folder: Path, *arguments: str) -> str:
    done = run_python(FOLDER / f"{name}.py", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracies(output: str) -> list[float]:
    return [float(each) for each in re.findall(r"^epoch \d+: val_acc (.*)$", output, re.MULTILINE)]


@pytest.mark.parametrize("name", ["base", "multi_process_metrics", "local_sgd", "batch_size", "profiler"])
def test_examples_that_train_as_the_base_does(tmp_path: Path, name: str) -> None:
    output = run(name, tmp_path)
    found = accuracies(output)
    assert len(found) == 5
    assert found[-1] > 0.95
    if name == "profiler":
        assert "Self CPU" in output
        assert [each.name for each in (tmp_path / "runs/profile").iterdir()] == ["profile-0.json"]
