"""The benchmark of the ranks' memory: its counts on two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from interpreters import run_command

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "sharded_memory.py"


@pytest.mark.slow
def test_two_ranks_hold_what_the_strategies_promise(tmp_path: Path) -> None:
    names = "ddp,deepspeed_stage_2,fsdp"
    arguments = ("--small", "--ranks", "2", "--families", "text", "--strategies", names, "--budget", "0")
    done = run_command([sys.executable, SCRIPT, *arguments, "--out", tmp_path], seconds=200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {
        row["strategy"]: row for row in map(json.loads, (tmp_path / "sharded_memory.jsonl").read_text().splitlines())
    }
    assert list(rows) == names.split(",")
    whole = 4 * rows["ddp"]["count"]
    ddp, zero, fsdp = rows.values()
    assert ddp["parameters"] == zero["parameters"] == whole
    assert ddp["gradients"] == 2 * whole  # its buckets too
    assert ddp["gathered"] == zero["gathered"] == 0
    assert ddp["optimizer"] == pytest.approx(2 * whole, rel=0.001)  # and the counts of its steps
    assert zero["optimizer"] == pytest.approx(1.5 * whole, rel=0.01)  # two moments and a master, halved
    assert fsdp["parameters"] == pytest.approx(0.5 * whole, rel=0.01)
    assert fsdp["optimizer"] == pytest.approx(whole, rel=0.01)
    assert 0 < fsdp["gathered"] < whole
    assert 0 < ddp["activations"] == zero["activations"] == fsdp["activations"]
    assert min(row["peak"] for row in rows.values()) > 0
    assert ddp["estimate"] == pytest.approx(5 * whole, rel=0.001)
    table = (tmp_path / "sharded_memory.md").read_text()
    assert table in done.stdout
    assert f"| text transformer, 0.5 M | `ddp` | {whole / 2**20:.1f} + 0.0 + {2 * whole / 2**20:.1f} + " in table
    assert (tmp_path / "sharded_memory.png").read_bytes().startswith(b"\x89PNG")
