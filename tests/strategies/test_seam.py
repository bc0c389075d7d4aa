"""Every call of the Engine to a strategy, on two gloo ranks. test_matrix.py moves state between strategies.

One job a strategy makes all the checks of seam_job.py, and a failed check ends it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job
from seam_job import seam

FIGURES = [
    "automatic norm losses",
    "automatic norm state",
    "automatic value state",
    "short window state",
    "manual plain state",
    "manual toggle state",
    "manual at root state",
    "evaluation loss",
    "state in and out",
    "resumed (bitwise)",
    "manual resumed (bitwise)",
    "Accelerator against ddp",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "ddp_sharded", "fsdp", "zero1", "zero2", "zero3"])
def test_every_strategy_does_what_the_engine_asks(name: str, tmp_path: Path) -> None:
    for reported in run_job(seam, 2, tmp_path / name):
        assert {figure.format(name=name) for figure in FIGURES} <= set(reported)
