"""Agreement over the key-value store, the board of failures, and the watch over the peers."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from deadlines import deadline, wait_until

from trainwright.distributed import failures as failures_module
from trainwright.distributed.agreement import Agreement
from trainwright.distributed.failures import (
    PEER_FAILED_EXIT_CODE,
    FailureBoard,
    PeerWatch,
    is_echo,
    summarize,
    write_error_file,
)
from trainwright.distributed.whereabouts import Whereabouts


def make_store() -> Any:
    return dist.HashStore()


def run_ranks(world_size: int, work: Callable[[Agreement], Any]) -> list[Any]:
    store = make_store()
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(work, [Agreement(store, rank, world_size) for rank in range(world_size)]))


def test_all_ranks_get_all_payloads_in_order() -> None:
    def work(agreement: Agreement) -> list[list[bytes]]:
        return [
            agreement.exchange(b"%d/%d" % (agreement.rank, call), call="a test", timeout_seconds=60)
            for call in range(20)
        ]

    expected = [[b"%d/%d" % (rank, call) for rank in range(3)] for call in range(20)]
    assert run_ranks(3, work) == [expected] * 3


def test_the_store_does_not_grow() -> None:
    store = make_store()
    agreements = [Agreement(store, rank, 2) for rank in range(2)]

    def work(agreement: Agreement) -> None:
        for _ in range(50):
            agreement.exchange(b"\x00\xff", call="a test", timeout_seconds=60)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, agreements))
    assert store.num_keys() <= 4


def test_who_has_left_is_not_waited_for() -> None:
    def work(agreement: Agreement) -> bytes | str:
        agreement.exchange(b"both", call="a test", timeout_seconds=60)
        if agreement.rank == 1:
            agreement.leave()
            return b""
        try:
            return agreement.exchange(b"alone", call="a test", timeout_seconds=60)[1]
        except RuntimeError as error:
            return str(error)

    said, _ = run_ranks(2, work)
    assert str(said).startswith("rank 1 has come to the end of its script, and rank 0 waits for it")


def test_ranks_in_different_calls_are_told_apart() -> None:
    """No rank takes what another has posted in another call for its answer; all of them say the same."""

    def work(agreement: Agreement) -> list[str]:
        said = []
        for call in ("a save of step 4" if agreement.rank == 1 else "the agreement on a stop", "both"):
            try:
                said += [text.decode() for text in agreement.exchange(b"here", call=call, timeout_seconds=60)]
            except RuntimeError as error:
                said.append(str(error))
        return said

    results = run_ranks(3, work)
    assert results == [results[0]] * 3
    assert results[0][0].startswith(
        "the ranks have come to different calls: rank 0 to the agreement on a stop, rank 1 to a save of step 4. All ranks"
    )
    assert results[0][1:] == ["here"] * 3  # they still pair up


def test_a_rank_that_has_passed_a_call_is_not_waited_for() -> None:
    store = make_store()
    places = [Whereabouts(rank) for rank in range(2)]
    first, second = (Agreement(store, rank, 2, whereabouts=places[rank]) for rank in range(2))
    batch = [3, 3]
    blocked, ended = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            places[1].answer(store)

    def go_on() -> list[bytes]:
        with second.following(lambda: ((batch[1],), f"fit, batch {batch[1]}")):
            met = second.exchange(b"1", call="both", timeout_seconds=60)
            batch[1] += 1
            blocked.wait(60)
            return met

    with ThreadPoolExecutor(2) as pool, first.following(lambda: ((batch[0],), f"fit, batch {batch[0]}")):
        pool.submit(watch)
        other = pool.submit(go_on)
        assert first.exchange(b"0", call="both", timeout_seconds=60) == [b"0", b"1"]
        with pytest.raises(
            RuntimeError,
            match=r"rank 0 makes a call that rank 1 has left out: a save \(fit, batch 3\)\. Rank 1 is past that \(fit, batch 4",
        ):
            first.exchange(b"0", call="a save", timeout_seconds=60)
        blocked.set()
        ended.set()
        assert other.result() == [b"0", b"1"]


def test_a_rank_that_is_only_slow_is_waited_for() -> None:
    store = make_store()
    places = [Whereabouts(rank) for rank in range(2)]
    first, second = (Agreement(store, rank, 2, whereabouts=places[rank]) for rank in range(2))
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            places[1].answer(store)

    def arrive_late() -> None:
        wait_until(lambda: store.check(["where/1"]))  # it has been asked where it is
        second.exchange(b"1", call="both", timeout_seconds=60)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(watch)
        other = pool.submit(arrive_late)
        assert first.exchange(b"0", call="both", timeout_seconds=60) == [b"0", b"1"]
        other.result()
        ended.set()


def test_rank_0_broadcasts() -> None:
    def work(agreement: Agreement) -> bytes:
        return agreement.broadcast(b"word" if agreement.rank == 0 else None, call="a test", timeout_seconds=60)

    assert run_ranks(3, work) == [b"word"] * 3
    with pytest.raises(TypeError, match="payload=None on rank 0"):
        Agreement(None, 0, 1).broadcast(None, call="a test", timeout_seconds=1)


def test_channels_do_not_mix() -> None:
    def work(agreement: Agreement) -> list[bytes]:
        first, second = agreement.channel("first"), agreement.channel("second")
        order = [(first, b"first"), (second, b"second")]
        # Threads of different ranks reach their channels in different orders.
        with ThreadPoolExecutor(2) as pool:
            turns = order if agreement.rank == 0 else order[::-1]
            done = {
                text: pool.submit(channel.exchange, text, call="a test", timeout_seconds=60) for channel, text in turns
            }
            return [*done[b"first"].result(), *done[b"second"].result()]

    assert run_ranks(2, work) == [[b"first", b"first", b"second", b"second"]] * 2


def test_channels_of_one_name_pair_up_by_their_order() -> None:
    """A second engine's saves read nothing that the first one's have left in the store."""

    def work(agreement: Agreement) -> list[bytes]:
        replies = []
        for text in (b"old", b"new"):
            channel = agreement.channel("saves")
            replies += channel.exchange(text + bytes(str(agreement.rank), "ascii"), call="a test", timeout_seconds=60)
        return replies

    assert run_ranks(2, work) == [[b"old0", b"old1", b"new0", b"new1"]] * 2


def test_a_wait_can_be_given_up() -> None:
    channel = Agreement(make_store(), 0, 2).channel("saves")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channel.exchange, b"", call="a test", timeout_seconds=60)
        channel.give_up()
        with pytest.raises(RuntimeError, match="waits for the others no longer"):
            waiting.result(timeout=deadline(20))


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0.05 s in a test for rank\(s\) \[1\] of 2"):
        Agreement(make_store(), 0, 2).exchange(b"", call="a test", timeout_seconds=0.05)


def test_more_than_one_rank_needs_a_store() -> None:
    with pytest.raises(ValueError, match="store=None with world_size=2"):
        Agreement(None, 0, 2)


def test_the_first_failure_is_kept() -> None:
    store = make_store()
    board = FailureBoard(store)
    assert board.first() is None
    assert FailureBoard(store).post_error(1, ValueError("bad\nmore")) == 1
    assert FailureBoard(store).post_error(0, KeyError("late")) == 2
    report = board.first()
    assert report is not None
    assert (report.rank, report.summary, report.was_printed) == (1, "ValueError: bad", False)
    assert "ValueError: bad\nmore" in report.traceback
    board.mark_printed()
    assert board.first() != report


def test_an_echo_is_told_from_an_error() -> None:
    lost = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
    assert is_echo(lost)
    outer = ValueError("while saving")
    outer.__cause__ = lost
    assert is_echo(outer)
    assert not is_echo(RuntimeError("shape mismatch"))
    assert summarize(RuntimeError()) == "RuntimeError"


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
    FailureBoard(store).post(1, "RuntimeError: boom")
    wait_until(lambda: PEER_FAILED_EXIT_CODE in exits)
    watch.stop()


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
    FailureBoard(store).post(1, "too late")
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
    report = FailureBoard(store).first()
    assert report is not None
    assert (report.rank, report.was_printed) == (1, True)
    assert exits == [PEER_FAILED_EXIT_CODE]


def test_a_keyboard_interrupt_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    store = make_store()
    PeerWatch(store, 1, 2).wrap_excepthook()
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert FailureBoard(store).count() == 0
    assert printed == []  # rank 0 alone shows it
