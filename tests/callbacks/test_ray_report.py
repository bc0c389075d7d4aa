"""RayReport without Ray. tests/cluster/test_ray.py tests it with Ray."""

from __future__ import annotations

import sys

import pytest

import trainwright as tw


def test_a_missing_ray_is_an_error_with_the_line_for_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r'RayReport needs Ray, .*: pip install "trainwright\[ray\]"'):
        tw.RayReport()
