"""`make test-gpu` runs every test marked `gpu`, and where there is no GPU says so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gpu_session
import pytest
from deadlines import deadline


def test_the_files_are_those_with_tests_of_a_gpu() -> None:
    found = {Path(path).name for path in gpu_session.files()}
    assert {"test_transfer.py", "test_tensors.py", "test_fit_on_device.py", "test_strategies_on_device.py"} <= found
    assert "test_fit.py" not in found


def test_what_is_missing_is_named_before_anything_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_session.missing() == []
    monkeypatch.setattr(gpu_session, "NEEDED", ("torch", "not_a_package", "nor_this"))
    assert gpu_session.main([]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("the tests on a GPU need not_a_package, nor_this, which ")


@pytest.mark.slow
def test_without_an_accelerator_everything_is_skipped_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, gpu_session.__file__]
    places = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if "simulated_device" not in each]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **hidden}, timeout=deadline(200)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert len(lines) == 1
    assert "sees no accelerator here" in lines[0]
    assert "passed" not in done.stdout
    done = subprocess.run(
        [*command, "-k", "no_such_test"], capture_output=True, text=True, cwd=tmp_path, timeout=deadline(200)
    )
    assert done.returncode == 0, done.stdout + done.stderr
