"""The clock of a session of tests on a GPU: it ends slow tests, and prints the device."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch


class SessionClock:
    """Skips what would begin after the session's time, and fails a test that takes too long.

    Args:
        minutes: how long tests may begin; half a minute later a process that still hangs is ended.
        seconds: of one test, where pytest-timeout is not there to see to it.
    """

    def __init__(self, minutes: float, seconds: int) -> None:
        self.minutes, self.seconds, self.start = minutes, seconds, time.monotonic()
        self.terminal = os.fdopen(os.dup(2), "w")  # pytest captures the standard streams
        self.watches = importlib.util.find_spec("pytest_timeout") is None and hasattr(signal, "setitimer")

    def pytest_report_header(self) -> str:
        kind = torch.accelerator.current_accelerator(check_available=True)
        if kind is None:
            return f"torch {torch.__version__} sees no accelerator here: every test is skipped"
        module: Any = torch.get_device_module(kind)
        name = module.get_device_name(0) if hasattr(module, "get_device_name") else kind.type
        return f"torch {torch.__version__} on {torch.accelerator.device_count()} x {name}"

    def pytest_sessionstart(self) -> None:
        # A call into a driver that never returns hears no signal.
        faulthandler.dump_traceback_later(60 * self.minutes + 30, exit=True, file=self.terminal)

    def pytest_sessionfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() - self.start > 60 * self.minutes:
            pytest.skip(f"the session's {self.minutes:g} minutes were over")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        if not self.watches:
            return (yield)

        def end(*_: Any) -> None:
            raise TimeoutError(f"{item.nodeid} took more than {self.seconds} s")

        before = signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
