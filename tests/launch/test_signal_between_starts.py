"""A signal that comes while failed ranks are being ended: the launcher leaves, and does not wait for the other nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


def test_a_signal_during_a_restart_ends_the_launcher() -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from trainwright.launch.agent import JobAgent

    agent: Any = object.__new__(JobAgent)
    nothing = SimpleNamespace(finish=lambda: None)
    vars(agent).update(shutdown=SimpleNamespace(number=15), logs=SimpleNamespace(output=nothing))
    vars(agent).update(_stop_workers=lambda _: None, _kill_all=lambda: None)
    with pytest.raises(SignalException):
        agent._restart_workers(None)
