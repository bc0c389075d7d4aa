"""Rung: the settings under which `trainwright ladder` runs a script, and the overrides that apply them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trainwright.overrides import Override, OverrideFile

COMPILER = "inductor"
"""The compiler backend of a raw loop that names none."""
OBSERVER = "trainwright.tools.ladder.recorder:LadderObserver"
SOURCE = "this rung of the ladder"


@dataclass(frozen=True)
class Rung:
    """One way to run a script. If a setting is None, the script's value stays."""

    name: str
    folder: str
    """Where the ranks write their records."""
    strategy: str | None = None
    devices: int | None = None
    precision: str | None = None
    compile: bool | None = None
    accelerator: str | None = None
    steps: int | None = None
    """The largest number of optimizer steps."""

    def write(self, path: Path) -> None:
        """Write the file of overrides under which the script runs."""
        overrides = [Override(*override, SOURCE) for override in self._overrides()]
        OverrideFile.write(path, overrides, OBSERVER, **asdict(self))

    @classmethod
    def read(cls, path: str) -> Rung:
        """Return the rung in a file that `write` made."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def _overrides(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the owner, the argument and the value of each override."""
        if self.steps is not None:
            yield "Trainer", "max_steps", self.steps
            yield "Trainer", "min_steps", None
        if self.compile is not None:
            yield "Trainer", "compile", self.compile
            yield "Accelerator", "dynamo_backend", COMPILER if self.compile else None
        if self.devices is not None:
            yield "Engine", "devices", self.devices
            yield "Engine", "num_nodes", 1
        for name, value in (
            ("accelerator", self.accelerator),
            ("strategy", self.strategy),
            ("precision", self.precision),
        ):
            if value is not None:
                yield "Engine", name, value
        yield "fit", "ckpt_path", None  # an earlier rung may have saved into the same folder
        for call in ("validate", "test", "predict") if self.steps is not None else ():
            yield call, "ckpt_path", None  # ended within its first epoch, the training has no best checkpoint
