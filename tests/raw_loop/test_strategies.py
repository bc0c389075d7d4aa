"""Under every strategy on two ranks: a Trainer's checkpoint in an Accelerator and back, and the files of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job
from small import assert_close
from strategies_job import both_ways

STRATEGIES = ["ddp", "ddp_sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
SHARDED = ("fsdp", "deepspeed_stage_3")


@pytest.mark.host
@pytest.mark.parametrize(
    "strategy", [each if each == "fsdp" else pytest.param(each, marks=pytest.mark.slow) for each in STRATEGIES]
)
def test_loops_and_trainers_load_checkpoints_of_the_other(tmp_path: Path, strategy: str) -> None:
    ranks = run_job(both_ways, 2, tmp_path / strategy)
    for rank, found in enumerate(ranks):
        assert_close(found["both"], found["whole"])
        assert found["steps"] == 6
        assert found["ranks with the state"] == (rank == 0 or strategy not in SHARDED)
