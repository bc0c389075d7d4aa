"""Logged values: the form in which the curves of a run are passed to this package. `loggers/history.py` has this form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

AXES = ("step", "epoch", "time")
"""The possible x axes."""
Numbers = NDArray[np.float64]


class LoggedSeries(Protocol):
    """The values of one metric, in the order of its steps."""

    @property
    def values(self) -> Numbers: ...


class LoggedRun(Protocol):
    """The metrics of one run by name."""

    @property
    def folder(self) -> str: ...
    @property
    def series(self) -> Mapping[str, LoggedSeries]: ...
    @property
    def problems(self) -> Sequence[str]: ...
    def x_of(self, series: Any, axis: str) -> Numbers:
        """Return the x value of each value of a series; ValueError if the run's files do not say it."""


def names_of_runs(folders: list[str]) -> list[str]:
    """Return short names that distinguish folders: their paths without the part that all have."""
    if len(folders) == 1:
        return ["/".join(_parts(folders[0])[-2:]) or folders[0]]
    parts = [_parts(each) for each in folders]
    shared = 0
    while all(len(each) > shared + 1 for each in parts) and len({each[shared] for each in parts}) == 1:
        shared += 1
    return ["/".join(each[shared:]) for each in parts]


def _parts(folder: str) -> list[str]:
    return [each for each in folder.split("/") if each]
