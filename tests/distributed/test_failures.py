"""The failures that ranks post, and the watch over the peers."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from deadlines import wait_until

from trainwright.distributed import failures as failures_module
from trainwright.distributed.failures import (
    PEER_FAILED_EXIT_CODE,
    FailureLog,
    PeerWatch,
    is_secondary_failure,
    summarize,
    write_error_file,
)


def make_store() -> Any:
    return dist.HashStore()


def test_the_first_failure_is_kept() -> None:
    store = make_store()
    log = FailureLog(store)
    assert log.first() is None
    assert FailureLog(store).post_error(1, ValueError("bad\nmore")) == 1
    assert FailureLog(store).post_error(0, KeyError("late")) == 2
    report = log.first()
    assert report is not None
    assert (report.rank, report.summary, report.was_printed) == (1, "ValueError: bad", False)
    assert "ValueError: bad\nmore" in report.traceback
    log.mark_printed()
    assert log.first() != report


def test_a_secondary_failure_is_told_from_an_error() -> None:
    lost = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
    assert is_secondary_failure(lost)
    outer = ValueError("while saving")
    outer.__cause__ = lost
    assert is_secondary_failure(outer)
    assert not is_secondary_failure(RuntimeError("shape mismatch"))
    assert summarize(RuntimeError()) == "RuntimeError"
    assert summarize(ValueError(f"{'a ' * 299}b\nmore")) == f"ValueError: {'a ' * 299}b"  # 599 characters
    assert summarize(ValueError("word " * 200)) == "ValueError: " + ("word " * 200)[:596] + " ..."
    assert summarize(ValueError("/path" * 200)) == f"ValueError: {('/path' * 200)[:596]} ..."
    noted = ValueError("bad")
    noted.add_note("Out of memory.\n  - ways")
    noted.add_note(" \n")
    noted.add_note("Pass less.")
    assert summarize(noted) == "ValueError: bad; Out of memory.; Pass less."


def test_the_error_file_is_elastics(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error_file(str(path), RuntimeError("boom"))
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "RuntimeError: boom"
    assert "boom" in message["extraInfo"]["py_callstack"]
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 60


class Left(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        if threading.current_thread() is threading.main_thread():
            raise Left

    monkeypatch.setattr(failures_module, "leave", leave)
    return codes


def test_a_failed_peer_ends_this_rank(exits: list[int]) -> None:
    store = make_store()
    watch = PeerWatch(store, 0, 2, poll_seconds=0.01)
    watch.start()
    time.sleep(0.05)
    assert exits == []
    FailureLog(store).post(1, "RuntimeError: boom")
    wait_until(lambda: PEER_FAILED_EXIT_CODE in exits)
    watch.stop()


def test_a_watcher_of_many_ranks_waits_longer() -> None:
    seconds = {count: PeerWatch(make_store(), 0, count).poll_seconds for count in (2, 500, 1000, 2000)}
    assert seconds == {2: 0.2, 500: 0.2, 1000: 0.4, 2000: 0.8}


def test_after_a_clean_close_nothing_ends_this_rank(exits: list[int]) -> None:
    store = make_store()
    host = PeerWatch(store, 0, 2, store_host=0, poll_seconds=0.01)
    other = PeerWatch(store, 1, 2, store_host=0, poll_seconds=0.01)
    host.start()
    other.start()
    began = time.monotonic()
    host.stop(farewell_seconds=120)
    assert time.monotonic() - began < 60  # the other one has said goodbye
    other.stop()
    FailureLog(store).post(1, "too late")
    time.sleep(0.05)
    assert exits == []


def test_an_uncaught_error_is_posted_then_printed(exits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    store = make_store()
    first, second = PeerWatch(store, 1, 2), PeerWatch(store, 0, 2)
    for watch, error in ((first, ValueError("one")), (second, ValueError("two"))):
        watch.wrap_excepthook()
        if watch is first:
            sys.excepthook(ValueError, error, None)
        else:
            with pytest.raises(Left):  # it came second, so it leaves in silence
                sys.excepthook(ValueError, error, None)
    assert [str(error) for error in printed] == ["one"]
    report = FailureLog(store).first()
    assert report is not None
    assert (report.rank, report.was_printed) == (1, True)
    assert exits == [PEER_FAILED_EXIT_CODE]


def test_a_keyboard_interrupt_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    store = make_store()
    PeerWatch(store, 1, 2).wrap_excepthook()
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert FailureLog(store).count() == 0
    assert printed == []  # only rank 0 shows it
