"""What a kind of random test is: a module that draws configurations and says what differs in the runs of one.

`benchmarks` is on the path, this folder is the package `fuzz` (`PYTHONPATH=benchmarks python -m fuzz`), and a kind is its
module `fuzz/<name>.py` with the names of `Kind`. It imports what its cases need at the top: a case is a fork of a process that
has imported the module, so it needs no import, leaves nothing behind, and fails by itself as it fails among others.

Jobs of several processes are started once for many cases (gloo; `trainwright.launch.processes`), and are not forked; they are
restarted after a case that raised, hung or ended them. `processes()` returns how many processes the current case runs in.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, Protocol

Config = dict[str, Any]
"""The configuration of one case: plain JSON values, every key always there."""


def processes() -> int:
    """Return how many processes the job has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Refused(Exception):
    """Raised by `differences` if trainwright refuses the configuration, before it trains, with a clear error.

    It is counted, and shown with its text, but does not count as a difference. Only the first run of a case may be refused:
    refusing to resume a run that was allowed is a difference.
    """


class Kind(Protocol):
    """What a kind's module defines."""

    NAME: str
    PROCESSES: tuple[int, ...]
    """The sizes of the jobs that a case is given to, one after the other, with the same folder: (1,), or (1, 2, 3). Where a
    configuration has a key `processes`, of the sizes above one only that one."""
    SIMPLEST: dict[str, list[Any]]
    """Simpler values of a key, the simplest first. Beyond them whole numbers are halved, and lists lose items."""
    LIMIT: float
    """Seconds that one case may take in one job; one that takes longer hangs, which is a difference."""

    def draw(self, random: random.Random) -> Config:
        """Draw a configuration; a kind of cells has `cells() -> list[Config]` instead."""

    def differences(self, config: Config, folder: Path) -> list[str]:
        """Make the runs of a case and return the differences, each as "<aspect>: <what>".

        Called on every process of the job, whose answers are combined. An exception is a difference too.
        """

    def script(self, config: Config, found: list[str]) -> str:
        """Optional: a program that shows the difference and exits with 1. By default one that calls `differences`."""

    def available(self) -> str:
        """Optional: why the kind cannot run here (a package that is not installed), or ""."""
