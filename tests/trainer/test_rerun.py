"""A script with ckpt_path="auto" that is killed and restarted until its end writes the same files as an uninterrupted
run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from forked import run_python
from small import assert_equal

JOB = Path(__file__).with_name("rerun_job.py")


def newest(folder: Path) -> Path:
    """Return the run folder in which the run finished. Other folders belong to runs killed before their first
    checkpoint."""
    runs = sorted((folder / "trainwright_logs").iterdir(), key=lambda each: int(each.name.rpartition("_")[2]))
    for each in runs[:-1]:  # the lock, and perhaps the half of a save
        assert all(name.startswith(".") for name in os.listdir(each / "checkpoints"))
    return runs[-1]


@pytest.mark.launch
@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_script_ends_like_an_uninterrupted_one_when_it_is_rerun(seeds: int, tmp_path: Path) -> None:
    done = run_python(JOB, tmp_path, seeds, seconds=240.0)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    whole = tmp_path / "whole"
    expected = (newest(whole) / "metrics.csv").read_bytes()
    assert expected.count(b"\n") > 20
    kept = set(os.listdir(newest(whole) / "checkpoints"))
    assert min(told["kills"]) >= 2, told
    assert "was held by process" in done.stdout  # the lock of a killed run
    for seed in range(seeds):
        folder = tmp_path / f"killed-{seed}"
        assert (newest(folder) / "metrics.csv").read_bytes() == expected
        assert (newest(folder) / "hparams.json").exists() == (newest(whole) / "hparams.json").exists()
        assert_equal(torch.load(folder / "weights.pt"), torch.load(whole / "weights.pt"))
        # One more may be there: the checkpoint that the last of the runs has gone on from is never removed by it.
        found = set(os.listdir(newest(folder) / "checkpoints"))
        assert kept <= found
        assert len(found - kept) <= 1, (seed, found, kept)
    # Run again when it had ended: nothing was trained, the test was made again in the same folder.
    assert told["again"] == 0
    assert "nothing is left to train" in done.stdout
    assert [each.name for each in (whole / "trainwright_logs").iterdir()] == ["version_0"]
    assert told["together"] == [[0, 3]] * 4
    for number in range(4):
        assert "kept is in use by another run: process " in (tmp_path / "two" / f"refused-{number}").read_text()
    assert sorted(os.listdir(tmp_path / "two" / "kept")) == [f"run-{number}.ckpt" for number in range(4)]
