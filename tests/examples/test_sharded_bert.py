"""The example examples/sharded_bert.py, on the ranks of a job."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
from jobs import run_job

SCRIPT = Path(__file__).parents[2] / "examples" / "sharded_bert.py"
ROW = r"^(\w+) +([\d.]+) MiB +([\d.]+) MiB +([\d.]+) % +[\d.]+$"


def run_script(*arguments: str) -> str:
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(sys, "argv", [SCRIPT.name, *arguments]),
    ):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return printed.getvalue()


def on_two(folder: Path) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as refused, pytest.raises(SystemExit):
        run_script("--strategies", "ddp,fdsp")
    assert "--strategies fdsp: choose from ddp, ddp_sharded, deepspeed_stage_1" in refused.getvalue()
    names = ("--strategies", "ddp_sharded,fsdp,deepspeed_stage_3")
    return run_script(*names, "--reviews", "400", "--epochs", "1", "--folder", str(folder))


@pytest.mark.slow
def test_what_a_process_holds(tmp_path: Path) -> None:
    output, other = run_job(on_two, 2, tmp_path)
    assert other == "", "rank 0 alone prints"
    rows = {name: list(map(float, row)) for name, *row in re.findall(ROW, output, re.MULTILINE)}
    assert list(rows) == ["ddp_sharded", "fsdp", "deepspeed_stage_3"]
    whole = rows["ddp_sharded"][0]
    for name, (parameters, optimizer, accuracy) in rows.items():
        part = whole if name == "ddp_sharded" else whole / 2
        assert parameters == pytest.approx(part, rel=0.03)
        assert optimizer == pytest.approx(whole, rel=0.03)  # a half of two moments
        assert accuracy == rows["fsdp"][2]
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.rglob("*.ckpt/manifest.json"))) == 3
