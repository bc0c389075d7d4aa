"""Tables of the commands: they fit a terminal without broken words, and are whole in a pipe."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from trainwright.__main__ import check_names
from trainwright.tools.columns import lay_out
from trainwright.tools.estimate import estimate_command
from trainwright.tools.runs import runs_command

LONG = Path("a_folder_with_a_long_name/another_folder_with_a_long_name/and_a_third_one_with_a_long_name")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[60, 80, 110])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def test_estimates_fit(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", said := Terminal())
    assert estimate_command(["--params", "7e9", "--memory", "12GiB", "--precision", "all"], check_names) == 0
    lines = said.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    heads = [line.split() for line in lines if line.startswith("  strategy")]
    assert all(head[0] == "strategy" and "total" in head for head in heads)
    assert ("sent" in heads[0]) == (width > 80)
    assert ("grads" in heads[0]) == (width >= 80)
    assert any(line.endswith("too large") for line in lines)


def test_lists_of_runs_drop_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = LONG / "version_17"
    run.mkdir(parents=True)
    (run / "metrics.csv").write_text("step,val_loss,val_acc\n3,0.53125,0.25\n")
    assert runs_command([".", "--sort", "val_loss"], check_names) == 0
    assert "written" in capsys.readouterr().out, "a pipe gets the whole table"
    monkeypatch.setenv("COLUMNS", "145")
    monkeypatch.setattr(sys, "stdout", said := Terminal())
    assert runs_command(["."], check_names) == 0
    lines = said.getvalue().splitlines()
    assert max(map(len, lines[:2])) <= 145
    assert lines[0].split() == ["run", "state", "step", "best"]
    assert lines[1].startswith(f"  {run}  unknown  3     val_loss 0.53125")


def test_columns_that_do_not_fit_are_dropped_in_order() -> None:
    rows = [("run", "path", "age"), ("a", "b" * 10, "3 s")]
    assert lay_out(rows, None, right=[2]) == ["  run  path        age", "  a    bbbbbbbbbb  3 s"]
    assert lay_out(rows, 22, dropped=[2, 1]) == lay_out(rows, None)
    assert lay_out(rows, 21, dropped=[2, 1]) == ["  run  path", "  a    bbbbbbbbbb"]
    assert lay_out(rows, 5, dropped=[2, 1]) == ["  run", "  a"]
