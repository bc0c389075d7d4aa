"""Runs that are killed and go on end as the one that nobody killed, and a soak that kills them finds it where they do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import deadline, wait_until
from started import Started

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "soak.py"
ONE_KILL = {1: "ddp_sharded", 7: "deepspeed_stage_1", 9: "deepspeed_stage_2", 8: "deepspeed_stage_3"}
"""By the number of its run. 1: all in a step, 7: all in a save, 9: a rank in a validation, 8: a rank in a save."""


def soak(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), "--out", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=deadline(580),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.launch
def test_a_killed_process_ends_as_the_one_that_nobody_killed(tmp_path: Path) -> None:
    done = soak(tmp_path, "--only", "0", "--strategies", "single_device", "--per-run", "1", "--epochs", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill 1: rank 0" in done.stdout
    assert "1 kills in 1 runs of 1 strategies: 0 runs that differ, 0 lost checkpoints, 0 things left" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_three_kills_of_one_run(tmp_path: Path, strategy: str) -> None:
    """One is of a rank, one of the launcher and one of all: after each, nothing of the job is left."""
    done = soak(tmp_path, "--only", "3", "--strategies", strategy, "--per-run", "3", "--epochs", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills in 1 runs of 1 strategies: 0 runs that differ, 0 lost checkpoints, 0 things left" in done.stdout
    for victim in ("rank ", "the launcher, ", "all, "):
        assert f": {victim}" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("number", "strategy"), ONE_KILL.items())
def test_one_kill_of_each_other_strategy(tmp_path: Path, number: int, strategy: str) -> None:
    """What is killed, and when, follows from the run's number; `make soak` kills each strategy many times."""
    done = soak(tmp_path, "--only", str(number), "--strategies", strategy, "--per-run", "1", "--epochs", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kills in 1 runs of 1 strategies: 0 runs that differ, 0 lost checkpoints, 0 things left" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "keys"),
    [
        ("generators", ["rank/0/rng"]),
        ("scale", ["state/precision/", "state/position/skipped_steps"]),  # it may end at the same scale again
        ("early_stopping", ["state/callbacks/EarlyStopping"]),
    ],
)
def test_what_a_resumed_run_forgets_is_found(tmp_path: Path, part: str, keys: list[str]) -> None:
    done = soak(
        tmp_path, "--only", "0", "--strategies", "single_device", "--per-run", "1", "--epochs", "3", "--forget", part
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 runs that differ" in done.stdout
    assert any(f"    {key}" in done.stdout for key in keys), done.stdout


@pytest.mark.slow
def test_a_soak_that_was_cut_goes_on(tmp_path: Path) -> None:
    settings = ("--strategies", "single_device", "--kills", "2", "--per-run", "1", "--epochs", "2", "--jobs", "1")
    first = Started([sys.executable, str(SCRIPT), "--out", str(tmp_path), *settings], tmp_path)
    try:
        first.wait_for("ends as the run that nobody killed")
        wait_until((tmp_path / "run-1" / "events-0").exists, 60.0)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(timeout=deadline(60))
        other = soak(tmp_path, *settings, "--seed", "1")
        assert other.returncode == 1
        assert "go on with these, or give another --out" in other.stderr
        done = soak(tmp_path, *settings)
    finally:
        first.close()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on after 1 kills" in done.stdout
    assert "2 kills in 2 runs" in done.stdout
    assert not (tmp_path / "soak.json").exists()  # the next soak begins anew
    first.check_nothing_left()


@pytest.mark.slow
def test_unknown_strategy_is_refused(tmp_path: Path) -> None:
    done = soak(tmp_path, "--strategies", "fdsp")
    assert done.returncode == 2
    assert "'fdsp' is unknown here; choose from ddp, ddp_sharded, fsdp, deepspeed_stage_1" in done.stderr
