"""Waits of tests scale with the machine, and none has a limit in plain seconds."""

from __future__ import annotations

import ast
from pathlib import Path

import deadlines
import pytest
from deadlines import deadline, wait_until

TESTS = Path(__file__).parent
WAITS = {"communicate", "run", "wait", "join", "Barrier", "result"}
"""Waits that take a limit by `timeout=`."""


def test_a_deadline_grows_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "load", lambda: 1.0)
    usual = deadline(10.0)
    assert usual >= 10.0
    monkeypatch.setattr(deadlines, "load", lambda: 1000.0)
    assert deadline(10.0) == 10_000.0


def test_a_condition_that_never_holds_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until(iter([False, True]).__next__)
    with pytest.raises(AssertionError, match="did not hold within"):
        wait_until(lambda: False, 0.01)


def test_no_wait_is_limited_in_plain_seconds() -> None:
    wrong = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in WAITS:
                limits = [each.value for each in node.keywords if each.arg == "timeout"]
                plain = [each for each in limits if isinstance(each, ast.Constant) and each.value]
                wrong += [f"{path}:{node.lineno}: say deadline({ast.unparse(each)})" for each in plain]
    assert not wrong
