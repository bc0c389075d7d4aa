"""How long a test waits before it fails: seconds of an idle machine, times how much slower this machine is now.

A deadline only says that something hangs. A test that passes never waits for one to end, so all of them are generous.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable

IDLE_START = 1.2
"""Seconds that an idle machine takes to start an interpreter and import torch in it."""
_VARIABLE = "TRAINWRIGHT_TEST_SLOWNESS"
"""Passes the measurement on to the processes that a test starts."""


def deadline(seconds: float) -> float:
    """Scale seconds of an idle machine to the present load of this machine."""
    return seconds * max(_slowness_at_start(), load())


def load() -> float:
    """Return how many processes compete for a core in the last minute, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Poll until the condition holds.

    Raises:
        AssertionError: it does not hold by the deadline.
    """
    limit = deadline(seconds)
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"{condition} did not hold within {limit:.0f} s"
        time.sleep(0.01)


@functools.cache
def _slowness_at_start() -> float:
    """Measure once a session, when the first deadline is asked for."""
    if _VARIABLE not in os.environ:
        began = time.perf_counter()
        # -P: the test's folder, in which it is, may have files like standard modules.
        subprocess.run([sys.executable, "-P", "-c", "import torch"], check=True, capture_output=True)
        os.environ[_VARIABLE] = str(max(1.0, (time.perf_counter() - began) / IDLE_START))
    return float(os.environ[_VARIABLE])
