"""The benchmark of the ranks' memory: its counts on two ranks, and its search for the widest network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from deadlines import deadline

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    import memory_job

    return memory_job


@pytest.mark.slow
def test_two_ranks_hold_what_the_strategies_promise(tmp_path: Path) -> None:
    names = "ddp,deepspeed_stage_2,fsdp"
    arguments = ("--small", "--ranks", "2", "--families", "text", "--strategies", names, "--budget", "0")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "sharded_memory.py"), *arguments, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=deadline(200),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
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


@pytest.mark.parametrize("start", [16, 144, 4000])
def test_the_search_ends_at_the_widest_that_fits(job: ModuleType, start: int) -> None:
    tried: list[int] = []

    def held_by(width: int) -> object:
        tried.append(width)
        return job.Held(width * width, 0, 0, 0, 100 * width, 0)

    known = start, held_by(start)
    tried.clear()
    width, held = job.widest(held_by, 40_000, known, 16)
    assert (width, held.total) == (144, 144 * 144 + 14_400)
    assert len(tried) == len(set(tried)) < 6
    assert job.widest(held_by, 100, known, 16) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--families", "text,sound"), "--families 'sound' is unknown; choose from text, image, speech, swav"),
        (("--ranks", "1,two"), "--ranks 1,two: numbers of processes from 2 on, such as 2,4"),
        (("--budget", "-1"), "--budget -1: MiB, or 0"),
    ],
)
def test_wrong_options_are_refused(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import sharded_memory

    monkeypatch.setattr(sys, "argv", ["sharded_memory.py", *options])
    with pytest.raises(SystemExit):
        sharded_memory.main()
    assert message in capsys.readouterr().err
