"""The benchmark of the strategies runs, and its table has a line for each loop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "strategies.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
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
