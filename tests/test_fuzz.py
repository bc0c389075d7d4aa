"""Random runs find no difference, and what differs is shrunk to the smallest configuration and shown by a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
TESTS = Path(__file__).resolve().parent


def fuzz(*arguments: str, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fuzz", *arguments],
        capture_output=True,
        text=True,
        timeout=880,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (*path, FOLDER, TESTS)))},
        check=False,
    )


def test_a_known_fault_is_shrunk_to_its_smallest_configuration_and_a_script_that_shows_it(tmp_path: Path) -> None:
    done = fuzz("fuzzed.toy", "--seeds", "30", "--failures", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("-- the smallest of")]
    smallest = json.loads(line.partition(": ")[2])
    assert len(smallest.pop("pears")) == 1
    assert smallest == {"apples": 3, "plums": False, "colour": "green"}
    script = tmp_path / "script.py"
    script.write_text(done.stdout.partition("-- a script of it\n")[2].partition("\n\ntoy: ")[0])
    assert len(script.read_text().splitlines()) < 15
    shown = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), str(TESTS)])},
        check=False,
    )
    assert (shown.returncode, shown.stdout.strip()) == (1, "fruit: too much of it"), shown.stderr


@pytest.mark.parametrize(
    ("colour", "code", "says"),
    [
        ("grey", 0, "refused 1: grey apples are no apples"),
        ("dead", 1, "exit: the process ended with -9"),
        ("slow", 1, "hang: 3 s"),
        ("bad", 1, "exception: ValueError: rotten"),
    ],
)
def test_a_case_that_refuses_dies_hangs_or_raises(colour: str, code: int, says: str) -> None:
    done = fuzz("fuzzed.toy", "--config", json.dumps({"colour": colour}), "--shrink", "0")
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout
    assert f"toy: 1 cases, {1 - code} refused, {code} different" in done.stdout


def test_a_kind_whose_package_is_not_there_says_so(tmp_path: Path) -> None:
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").write_text("raise ImportError('not here')")
    done = fuzz("peer", path=(tmp_path,))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "peer: passed over, lightning is not installed (pip install lightning)" in done.stdout


def test_an_unknown_kind_is_refused() -> None:
    done = fuzz("resumes")
    assert done.returncode == 2
    assert "unknown kind 'resumes'; choose from resume, cuts, ranks, raw, state, layers, peer" in done.stderr


def test_a_few_seeds() -> None:
    """Of raw the second part is a job of two ranks."""
    done = fuzz("resume", "cuts", "raw", "--seeds", "1", "--start", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("resume", "cuts", "raw"):
        assert f"{name}: 1 cases, 0 refused, 0 different" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seeds"),
    [("resume", 20), ("cuts", 20), ("ranks", 12), ("raw", 25), ("state", 12), ("layers", 12), ("peer", 20)],
)
def test_seeds_of_each_kind(kind: str, seeds: int) -> None:
    done = fuzz(kind, "--seeds", str(seeds), "--start", "1000" if kind not in ("state", "layers") else "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kind}: {seeds} cases" in done.stdout or f"{kind}: passed over" in done.stdout
