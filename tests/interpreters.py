"""The search path of interpreters that tests start."""

from __future__ import annotations

import os
from pathlib import Path

QUICK_START = str(Path(__file__).with_name("quick_start"))


def search_path(*folders: Path | str) -> str:
    """Return a PYTHONPATH of folders, by which an interpreter starts as in `quick_start`."""
    return os.pathsep.join([QUICK_START, *(str(each) for each in folders if str(each) != QUICK_START)])
