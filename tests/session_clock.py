"""The clock of a session of tests on a GPU: it ends slow sessions, and prints the device."""

from __future__ import annotations

import faulthandler
import os
import time
from typing import Any

import pytest
import torch


class SessionClock:
    """Skips tests that would begin after the session's time.

    Args:
        minutes: how long tests may begin. Half a minute later a process that still hangs is ended.
    """

    def __init__(self, minutes: float) -> None:
        self.minutes, self.start = minutes, time.monotonic()
        self.terminal = os.fdopen(os.dup(2), "w")  # pytest captures the standard streams

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
