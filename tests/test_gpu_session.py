"""`make test-gpu` runs every test marked `gpu`, and where there is no GPU says so in one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import gpu_session
import pytest
from interpreters import run_command


def test_the_files_are_those_with_tests_of_a_gpu() -> None:
    found = {Path(path).name for path in gpu_session.files()}
    assert {"test_transfer.py", "test_tensors.py", "test_fit_on_device.py", "test_strategies_on_device.py"} <= found
    assert "test_fit.py" not in found


@pytest.mark.slow
def test_without_an_accelerator_everything_is_skipped_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, gpu_session.__file__]
    places = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if "simulated_device" not in each]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(places)}
    done = run_command(command, folder=tmp_path, seconds=200, **hidden)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert len(lines) == 1
    assert "sees no accelerator here" in lines[0]
    assert "passed" not in done.stdout
