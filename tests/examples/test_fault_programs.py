"""The programs of examples/faults/ cause a fault, and end with "ok" only if Trainwright kept its promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import deadline

FOLDER = Path(__file__).parents[2] / "examples" / "faults"
PROMISES = {
    "flipped_bit": "model-00000.safetensors does not match its digest",
    "killed": r"metrics\.csv: the same bytes in both runs",
    "nan_on_one_rank": r"the loss of rank 1 is nan, found at step 11 \(epoch 0, batch 11\)",
    "other_world_size": "resumed at step 35 on 3: the same weights, the same samples in every step",
    "short_window": r"window of 2 batches: 1\.0000 of the plain loop's gradient",
    "stopped_rank": r"rank 1 never came: at \S*stopped_rank\.py:\d+ in read_from_a_silent_server",
    "uneven_evaluation": "predict on three processes: 103 outputs, in order",
}


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize("name", PROMISES)
def test_a_fault_ends_as_promised(name: str) -> None:
    command = [sys.executable, "-W", "error", str(FOLDER / f"{name}.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=deadline(240.0))
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(PROMISES[name], run.stdout), run.stdout
    assert run.stdout.splitlines()[-1].startswith("ok: ")


def test_the_programs_are_short_and_tested() -> None:
    lines = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert set(lines) - {"story"} == set(PROMISES)
    assert max(lines.values()) < 75
