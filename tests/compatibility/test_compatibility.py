"""The cases under Trainwright have the same results as under Lightning. record.py writes those into `expected.json`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import driver
import pytest
from deadlines import deadline
from differences import DIFFERENCES, EXACT, SAFE, VISIBLE

MOST_DIFFERENCES = 19

pytestmark = pytest.mark.host  # the expected numbers were computed on a CPU


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(driver.EXPECTED.read_text())
    return found


def differing(found: dict[str, Any], expected: dict[str, Any]) -> set[str]:
    return {name for name in expected if found.get(name) != expected[name]}


def test_each_case_is_recorded(expected: dict[str, Any]) -> None:
    assert sorted(expected) == sorted(driver.cases())
    failed = [name for name, result in expected.items() if isinstance(result, dict) and "raised" in result]
    assert not failed, "a case that fails under Lightning compares nothing"


def test_few_cases_may_differ(expected: dict[str, Any]) -> None:
    assert len(expected) >= 100
    assert set(DIFFERENCES) <= set(expected)
    assert len(DIFFERENCES) <= MOST_DIFFERENCES
    assert {gain for gain, _ in DIFFERENCES.values()} <= {EXACT, SAFE, VISIBLE}


@pytest.mark.slow
def test_only_the_listed_cases_differ(expected: dict[str, Any]) -> None:
    found = json.loads(json.dumps(driver.results("trainwright")))
    wrong = differing(found, expected) ^ set(DIFFERENCES)
    shown = {name: {"lightning": expected[name], "trainwright": found[name]} for name in sorted(wrong)}
    assert not wrong, f"listed in differences.py and alike, or different and not listed: {json.dumps(shown, indent=1)}"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None or importlib.metadata.version("lightning") != driver.VERSION,
    reason=f"lightning {driver.VERSION} is not installed",
)
def test_the_record_is_that_of_lightning(expected: dict[str, Any], tmp_path: Path) -> None:
    program = Path(driver.__file__)
    subprocess.run(
        [sys.executable, str(program), "lightning", str(tmp_path / "found.json")], check=True, timeout=deadline(900)
    )
    assert differing(json.loads((tmp_path / "found.json").read_text()), expected) == set()
