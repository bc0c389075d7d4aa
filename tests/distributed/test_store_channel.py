"""The channel over the key-value store: payloads swapped in order, and ranks that do not come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from deadlines import deadline, wait_until

from trainwright.distributed import store_channel
from trainwright.distributed.store_channel import RankPositions, StoreChannel


def make_store() -> Any:
    return dist.HashStore()


def run_ranks(world_size: int, work: Callable[[StoreChannel], Any]) -> list[Any]:
    store = make_store()
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(work, [StoreChannel(store, rank, world_size) for rank in range(world_size)]))


@pytest.fixture(params=["all at once", "by groups"])
def of_each_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return a number of ranks, which read all posts, or let the first ranks of groups of two collect them."""
    if request.param == "all at once":
        return 3
    monkeypatch.setattr(StoreChannel, "group_size", 2)
    monkeypatch.setattr(store_channel, "LARGEST_VALUE", 10)
    return 7


def test_all_ranks_get_all_payloads_in_order(of_each_size: int) -> None:
    def work(channel: StoreChannel) -> list[list[bytes]]:
        return [
            channel.exchange(b"%d\xff%d" % (channel.rank, call), call="a test", timeout_seconds=120)
            for call in range(20)
        ]

    expected = [[b"%d\xff%d" % (rank, call) for rank in range(of_each_size)] for call in range(20)]
    assert run_ranks(of_each_size, work) == [expected] * of_each_size


def test_only_the_first_rank_gets_the_second_parts(of_each_size: int) -> None:
    def work(channel: StoreChannel) -> list[bytes]:
        own = b"%d" % channel.rank
        return channel.exchange(b"+", call="a test", timeout_seconds=120, for_first=own)

    first, *others = run_ranks(of_each_size, work)
    assert first == [b"+%d" % rank for rank in range(of_each_size)]
    assert others == [[b"+"] * of_each_size] * (of_each_size - 1)


def test_the_store_does_not_grow(of_each_size: int) -> None:
    store = make_store()
    channels = [StoreChannel(store, rank, of_each_size) for rank in range(of_each_size)]
    counts = []

    def work(channel: StoreChannel) -> None:
        for call in range(50):
            channel.exchange(b"\x00\xff", call="a test", timeout_seconds=120)
            if channel.rank == 0 and call in (4, 49):
                counts.append(store.num_keys())

    with ThreadPoolExecutor(of_each_size) as pool:
        list(pool.map(work, channels))
    assert counts[1] <= counts[0] + 2 * of_each_size  # ranks delete the keys of a call during the next one


class CountedStore:
    """Counts the requests of one rank, except for the checks of a wait, whose number depends on time."""

    def __init__(self, store: Any) -> None:
        self._store, self.count = store, 0

    def __getattr__(self, name: str) -> Any:
        self.count += name != "check"
        return getattr(self._store, name)


def test_a_rank_sends_as_many_requests_among_more_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreChannel, "group_size", 8)

    def requests(world_size: int) -> list[int]:
        store = make_store()
        counted = [CountedStore(store) for _ in range(world_size)]

        def work(rank: int) -> None:
            channel = StoreChannel(counted[rank], rank, world_size)
            for _ in range(3):
                channel.exchange(b"+", call="a test", timeout_seconds=120, for_first=b"result")

        with ThreadPoolExecutor(world_size) as pool:
            list(pool.map(work, range(world_size)))
        return [rank.count for rank in counted]

    few, many = requests(16), requests(64)
    assert few[1:] == many[1:16] == many[17:32]
    assert few[0] + 6 >= many[0] > few[0]  # rank 0 reads the second parts of all, 32 in a request


def test_who_has_left_is_not_waited_for() -> None:
    def work(channel: StoreChannel) -> bytes | str:
        channel.exchange(b"both", call="a test", timeout_seconds=120)
        if channel.rank == 1:
            channel.leave()
            return b""
        try:
            return channel.exchange(b"alone", call="a test", timeout_seconds=60)[1]
        except RuntimeError as error:
            return str(error)

    said, _ = run_ranks(2, work)
    assert str(said).startswith("rank 1 has exited while rank 0 waits for it")


def test_ranks_in_different_calls_are_told_apart(of_each_size: int) -> None:
    """No rank accepts another call's post as its answer, and all ranks raise the same error."""

    def work(channel: StoreChannel) -> list[str]:
        said = []
        for call in ("a save of step 4" if channel.rank == 1 else "the agreement on a stop", "both"):
            try:
                said += [text.decode() for text in channel.exchange(b"here", call=call, timeout_seconds=120)]
            except RuntimeError as error:
                said.append(str(error))
        return said

    results = run_ranks(of_each_size, work)
    assert results == [results[0]] * of_each_size
    assert results[0][0].startswith(
        "the ranks have met in different calls: rank 0 in the agreement on a stop, rank 1 in a save of step 4. Make such"
    )
    assert results[0][1:] == ["here"] * of_each_size  # they still pair up


def test_a_rank_that_has_passed_a_call_is_not_waited_for() -> None:
    store = make_store()
    positions = [RankPositions(rank) for rank in range(2)]
    first, second = (StoreChannel(store, rank, 2, positions=positions[rank]) for rank in range(2))
    batch = [3, 3]
    blocked, ended = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            positions[1].answer(store)

    def go_on() -> list[bytes]:
        with positions[1].located_by(lambda: ((batch[1],), f"fit, batch {batch[1]}")):
            met = second.exchange(b"1", call="both", timeout_seconds=120)
            batch[1] += 1
            blocked.wait(120)
            return met

    with ThreadPoolExecutor(2) as pool, positions[0].located_by(lambda: ((batch[0],), f"fit, batch {batch[0]}")):
        pool.submit(watch)
        other = pool.submit(go_on)
        assert first.exchange(b"0", call="both", timeout_seconds=120) == [b"0", b"1"]
        with pytest.raises(
            RuntimeError,
            match=r"rank 1 has skipped: a save \(fit, batch 3\)\. Rank 1 is already past it \(fit, batch 4",
        ):
            first.exchange(b"0", call="a save", timeout_seconds=60)
        blocked.set()
        ended.set()
        assert other.result() == [b"0", b"1"]


def test_a_rank_that_is_only_slow_is_waited_for() -> None:
    store = make_store()
    positions = [RankPositions(rank) for rank in range(2)]
    first, second = (StoreChannel(store, rank, 2, positions=positions[rank]) for rank in range(2))
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            positions[1].answer(store)

    def arrive_late() -> None:
        wait_until(lambda: store.check(["position/1"]))  # it has been asked where it is
        second.exchange(b"1", call="both", timeout_seconds=120)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(watch)
        other = pool.submit(arrive_late)
        assert first.exchange(b"0", call="both", timeout_seconds=120) == [b"0", b"1"]
        other.result()
        ended.set()


def test_channels_do_not_mix() -> None:
    def work(channel: StoreChannel) -> list[bytes]:
        first, second = channel.subchannel("first"), channel.subchannel("second")
        order = [(first, b"first"), (second, b"second")]
        # Threads of different ranks reach their channels in different orders.
        with ThreadPoolExecutor(2) as pool:
            turns = order if channel.rank == 0 else order[::-1]
            done = {text: pool.submit(each.exchange, text, call="a test", timeout_seconds=120) for each, text in turns}
            return [*done[b"first"].result(), *done[b"second"].result()]

    assert run_ranks(2, work) == [[b"first", b"first", b"second", b"second"]] * 2


def test_channels_of_one_name_are_paired_by_their_order() -> None:
    """A second engine's saves read nothing that the first one's have left in the store."""

    def work(channel: StoreChannel) -> list[bytes]:
        replies = []
        for text in (b"old", b"new"):
            saves = channel.subchannel("saves")
            replies += saves.exchange(text + bytes(str(channel.rank), "ascii"), call="a test", timeout_seconds=120)
        return replies

    assert run_ranks(2, work) == [[b"old0", b"old1", b"new0", b"new1"]] * 2


def test_a_wait_can_be_given_up() -> None:
    channel = StoreChannel(make_store(), 0, 2).subchannel("saves")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channel.exchange, b"", call="a test", timeout_seconds=60)
        channel.give_up()
        with pytest.raises(RuntimeError, match="no longer waits for the others"):
            waiting.result(timeout=deadline(20))


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0.05 s in a test for rank\(s\) \[1\] of 2"):
        StoreChannel(make_store(), 0, 2).exchange(b"", call="a test", timeout_seconds=0.05)


def test_a_missing_rank_of_another_group_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreChannel, "group_size", 2)

    def work(channel: StoreChannel) -> str:
        if channel.rank == 4:
            return ""
        with pytest.raises(TimeoutError) as error:
            channel.exchange(b"", call="a test", timeout_seconds=0.3)
        return str(error.value)

    assert all("for rank(s) [4] of 5" in text for text in run_ranks(5, work) if text)
