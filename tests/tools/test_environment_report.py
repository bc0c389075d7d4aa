"""`trainwright env` shows facts of the machine and hides secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import trainwright as tw
from trainwright.__main__ import check_names
from trainwright.tools.environment_report import env_command


def test_what_a_bug_report_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("devices: 2\nenv:\n  OMP_NUM_THREADS: 3\n  NAME: hidden-1\n  NCCL_TOKEN: hidden-2\n")
    for name, value in (
        ("TRAINWRIGHT_CONFIG", "mine.yaml"),
        ("NCCL_DEBUG", "INFO"),
        ("TORCH_KEY", "hidden-3"),
        ("GLOO_PROXY", "http://me:hidden-4@host"),
        ("SOMETHING_ELSE", "hidden-5"),
    ):
        monkeypatch.setenv(name, value)
    assert env_command(["--json"], check_names) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert (found["trainwright"], found["packages"]["torch"]) == (tw.__version__, torch.__version__)
    assert found["strategies"]["ddp"] == "installed"
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert "SOMETHING_ELSE" not in found["variables"]
    assert found["config"]["values"] == {
        "devices": "2",
        "env OMP_NUM_THREADS": "3",
        "env NAME": "(not shown)",
        "env NCCL_TOKEN": "(not shown)",
    }
    assert env_command([], check_names) == 0
    lines = capsys.readouterr().out
    assert f"\n  torch: {torch.__version__}\n" in lines
    assert "\n    env NAME: (not shown)" in lines
    assert "hidden-" not in text + lines


def test_a_wrong_config_is_part_of_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text("devcies: 2")
    monkeypatch.setenv("TRAINWRIGHT_CONFIG", "mine.yaml")
    assert env_command([], check_names) == 0
    assert "  error: mine.yaml: 'devcies' is not a key of a config" in capsys.readouterr().out
