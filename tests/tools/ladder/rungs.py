"""Rungs for tests: one set for this process, and attempts whose figures are made up."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

import pytest

from trainwright.distributed.environment import RUNG_VARIABLE
from trainwright.overrides import OverrideFile, active_file
from trainwright.tools.ladder.attempt import Attempt, RungRecord
from trainwright.tools.ladder.rung import Rung


def set_rung(monkeypatch: pytest.MonkeyPatch, folder: Path, **settings: Any) -> OverrideFile:
    """Run the rest of a test under a rung."""
    folder.mkdir(exist_ok=True)
    path = folder / "rung.json"
    Rung("tried", str(folder), **settings).write(path)
    monkeypatch.setenv(RUNG_VARIABLE, str(path))
    monkeypatch.setattr(atexit, "register", lambda *_: None)  # the folder may be gone when pytest ends
    file = active_file()
    assert file is not None
    return file


def record(**changes: Any) -> RungRecord:
    """Return a record. The default of `seconds` follows from its rate of samples says."""
    if changes.get("samples_per_second"):
        changes.setdefault("seconds", 480 / changes["samples_per_second"])
    points = tuple((step, 0.5 + 0.1 * step) for step in range(1, 21))
    values: dict[str, Any] = {
        "owner": "Trainer", "steps": 20, "seconds": 3.0, "points": points, "samples_per_second": 160.0,
        "batches_per_second": 10.0, "steps_per_second": 10.0, "peak_bytes": 3 << 20,
        "metrics": {"test": {"test_loss": 0.4, "test_acc": 0.9}},
        "logged": {}, "replaced": {}, "is_cut": False, "planned_steps": 20,
        "facts": {"processes": 1, "device": "cpu"},
    }  # fmt: skip
    return RungRecord(**{**values, **changes})


def attempt(name: str, state: Any = "finished", reason: str = "", **changes: Any) -> Attempt:
    of_rung = {
        key: changes.pop(key)
        for key in ("accelerator", "devices", "strategy", "precision", "compile")
        if key in changes
    }
    printed = changes.pop("printed", {})
    if name != "unchanged":
        changes.setdefault("replaced", {"precision": ("None", "'bf16-mixed'")})
    made = record(**changes) if state == "finished" else None
    return Attempt(Rung(name, "folder", **of_rung), state, reason, made, printed, f"ladder/{name}/output.log", 5.0)
