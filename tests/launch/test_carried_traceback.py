"""A traceback of another process, told with the source of a cell that only this one has."""

from __future__ import annotations

import linecache
import traceback
from typing import Any

import pytest

from trainwright.launch.notebook import with_sources

CELL = "def step(batch):\n    raise ValueError('no such batch')\n"


def test_the_lines_of_a_cell_are_looked_up_where_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    exec(compile(CELL, "<cell 7>", "exec"), names)
    try:
        try:
            names["step"](3)
        except ValueError as error:
            raise RuntimeError("the run has failed") from error
    except RuntimeError:
        carried = traceback.format_exc()
    assert "raise ValueError" not in with_sources(carried)
    monkeypatch.setitem(linecache.cache, "<cell 7>", (len(CELL), None, CELL.splitlines(True), "<cell 7>"))
    first, second = with_sources(carried).split("The above exception was the direct cause of the following exception:")
    assert '  File "<cell 7>", line 2, in step\n    raise ValueError(' in first
    assert second.endswith("RuntimeError: the run has failed\n")
    assert "test_the_lines_of_a_cell" in second
