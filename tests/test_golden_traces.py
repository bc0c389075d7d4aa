"""Two records of the same package are equal, and a difference is named by its case and field."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import deadline
from golden_traces import main
from interpreters import search_path

pytestmark = [pytest.mark.slow, pytest.mark.host]


def test_two_records_are_equal_and_a_changed_loss_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The records have ten seeds of the kind peer and ten compatibility cases."""
    folders = [tmp_path / "one", tmp_path / "other"]
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("golden_traces.py")), "record"]
    options = ["--kinds", "peer", "cases", "--seeds", "0:10"]
    recordings = [
        subprocess.Popen(
            [*command, str(folder), *options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()},
        )
        for folder in folders
    ]
    for recording in recordings:
        said, _ = recording.communicate(timeout=deadline(300))
        assert recording.returncode == 0, said
        assert "peer: 10 cases" in said
    compare = ["compare", *map(str, folders)]
    assert main(compare) == 0, capsys.readouterr().out
    assert "cases: 0 of 10 cases differ" in capsys.readouterr().out

    changed = folders[1] / "peer.jsonl"
    first, *rest = map(json.loads, changed.read_text().splitlines())
    fit = first["trace"]["processes"]["1-0"][0]
    at = next(number for number, hook in enumerate(fit["hooks"]) if "Net.training_step" in hook)
    fit["hooks"][at] += " changed"
    changed.write_text("\n".join(map(json.dumps, [first, *rest])))
    assert main(compare) == 1
    assert f"  peer 0: processes.1-0.0.hooks.{at}: " in capsys.readouterr().out
    assert main([*compare, "--ignore", r"\.hooks\."]) == 0


def test_records_without_a_common_case_do_not_count_as_equal(tmp_path: Path) -> None:
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 1
