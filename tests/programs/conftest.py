"""These files import large packages, so a run without slow tests does not collect them."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if "not slow" in config.getoption("markexpr") else None
