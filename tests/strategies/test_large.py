"""A model of 0.2 billion parameters under fsdp on four ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from jobs import run_job
from large_job import MIB, resume, train


@pytest.mark.slow
@pytest.mark.host  # the memory of the process is the device's memory
def test_no_rank_holds_more_than_its_share_and_a_few_groups(tmp_path: Path) -> None:
    """A group is a block, a twelfth of the model. Shards of parameters, gradients and two moments are four shares."""
    try:
        trained = run_job(train, 4, tmp_path, seconds=200)
        resumed = run_job(resume, 4, tmp_path, seconds=200)
    finally:
        shutil.rmtree(tmp_path)  # gigabytes
    for before, after in zip(trained, resumed, strict=True):
        assert before["count"] > 0.19e9
        share, group = before["count"] / MIB, 4 * before["block"] / MIB  # of four bytes on four ranks
        first, second = before["peaks"], after["peaks"]
        assert max(first["setup"], second["setup"]) < share + 2 * group, (first, second)
        assert second["load"] < 3 * share + group, second
        assert first["save"] < 4 * share + group, first
        # A backward has two gathered groups, the gradients of a whole group, and copies to send and to receive.
        assert max(first["step"], second["step"]) < 4 * share + 5 * group, (first, second)
        assert after["sums"] == before["sums"]
