"""Random runs find no difference, and a difference is shrunk to the smallest configuration and shown by a script."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from interpreters import run_command, search_path

pytestmark = pytest.mark.timeout(900)

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
TESTS = Path(__file__).resolve().parent


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, "-m", "fuzz", *arguments], seconds=880, PYTHONPATH=search_path(FOLDER, TESTS))


@pytest.mark.launch
def test_a_known_fault_is_shrunk_to_its_smallest_configuration_and_a_script_that_shows_it(tmp_path: Path) -> None:
    done = fuzz("fuzzed.toy", "--seeds", "30", "--failures", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("-- the smallest of")]
    smallest = json.loads(line.partition(": ")[2])
    assert len(smallest.pop("pears")) == 1
    assert smallest == {"apples": 3, "plums": False, "colour": "green"}
    script = tmp_path / "script.py"
    script.write_text(done.stdout.partition("-- a script of it\n")[2].partition("\n\ntoy: ")[0])
    assert len(script.read_text().splitlines()) < 15
    shown = run_command([sys.executable, script], PYTHONPATH=search_path(FOLDER, TESTS))
    assert (shown.returncode, shown.stdout.strip()) == (1, "fruit: too much of it"), shown.stderr


@pytest.mark.launch
@pytest.mark.parametrize(("colour", "code", "says"), [
    ("grey", 0, "refused 1: grey apples are no apples"),
    ("dead", 1, "exit: the process ended with -9"),
    ("slow", 1, "hang: 3 s"),
    ("bad", 1, "exception: ValueError: rotten"),
])  # fmt: skip
def test_a_case_that_refuses_dies_hangs_or_raises(colour: str, code: int, says: str) -> None:
    done = fuzz("fuzzed.toy", "--config", json.dumps({"colour": colour}), "--shrink", "0")
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout
    assert f"toy: 1 cases, {1 - code} refused, {code} different" in done.stdout


@pytest.fixture
def hunting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program in this process."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("fuzz.__main__")


KINDS = "choose from resume, cuts, ranks, raw, state, layers, peer"
KEYS = "toy has no key 'pots'; its keys are apples, pears, plums, colour"


@pytest.mark.parametrize(("arguments", "says"), [
    ("resumes", f"unknown kind 'resumes'; {KINDS}"),
    ("foo.bar", f"unknown kind 'foo.bar'; {KINDS}"),
    ('fuzzed.toy --config {"apples":3,"pots":1}', KEYS),
    ('--config {"apples":3}', "--config is of one kind, not of all: give one KIND (make: KINDS=resume)"),
    ('resume cuts --config {"seed":3}', "not of 2: give one KIND"),
    ("fuzzed.toy --config [3]", "'[3]' is no JSON object; give an object of the kind's keys, as '{\"seed\": 3}'"),
    ("fuzzed.toy --config apples", "'apples' is not JSON (Expecting value"),
    ("fuzzed.toy --seeds 0", "--seeds 0: give a whole number from 1 up"),
    ("fuzzed.toy --start -1", "--start -1: give a whole number from 0 up"),
    ("fuzzed.toy --minutes 0", "--minutes 0: give a number above 0"),
])  # fmt: skip
def test_what_cannot_be_hunted_is_refused(hunting: Any, arguments: str, says: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        hunting.main(arguments.split())
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("usage: python -m fuzz ")
    assert "python -m fuzz: error: " in said
    assert says in said


def test_a_value_of_which_no_script_can_be_written_is_printed_and_the_hunt_ends_as_ever(
    hunting: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(config: dict[str, Any], found: list[str]) -> str:
        return {"red": ""}[config["colour"]]

    monkeypatch.setattr(importlib.import_module("fuzzed.toy"), "script", script, raising=False)
    assert hunting.main(["fuzzed.toy", "--config", '{"colour": "bad"}', "--shrink", "0"]) == 1
    said = capsys.readouterr().out
    assert "-- no script of it, KeyError: 'bad'; the configuration: {" in said
    assert '"colour": "bad"' in said
    assert "toy: 1 cases, 0 refused, 1 different" in said


@pytest.mark.launch
def test_a_few_seeds_do_not_differ() -> None:
    """Of raw the second part is a job of two ranks."""
    done = fuzz("resume", "cuts", "raw", "--seeds", "1", "--start", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("resume", "cuts", "raw"):
        assert f"{name}: 1 cases, 0 refused, 0 different" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seeds"), [("resume", 6), ("cuts", 6), ("ranks", 4), ("raw", 6), ("state", 6), ("layers", 6), ("peer", 6)]
)
def test_seeds_of_all_kinds_do_not_differ(kind: str, seeds: int) -> None:
    """A few seeds, or one cell under every strategy. `make fuzz` has more."""
    done = fuzz(kind, "--seeds", str(seeds), "--start", "1000" if kind not in ("state", "layers") else "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kind}: {seeds} cases" in done.stdout or f"{kind}: passed over" in done.stdout
