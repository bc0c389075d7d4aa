"""Interpreters and other commands that tests start."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from deadlines import deadline

QUICK_START = str(Path(__file__).with_name("quick_start"))


def search_path(*folders: Path | str) -> str:
    """Return a PYTHONPATH of folders, by which an interpreter starts as in `quick_start`."""
    return os.pathsep.join([QUICK_START, *(str(each) for each in folders if str(each) != QUICK_START)])


def run_command(
    command: Sequence[object], *, folder: Path | str | None = None, seconds: float = 120.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with more variables."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=deadline(seconds),
        check=False,
    )
