"""Sync points: all ranks act on any rank's request at the same boundary, and no request is lost."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import deadline
from jobs import run_job

from trainwright.distributed import connection as connection_module
from trainwright.distributed.connection import open_process_group
from trainwright.distributed.environment import Environment
from trainwright.distributed.sync_points import SyncPoint, SyncPoints

ROUNDS = 30


def reach_sync_points(folder: Path) -> dict[str, Any]:
    """Run loops with a real all-reduce a step, in which random ranks ask at random times, from threads and signals."""
    connection_module.PeerWatch = functools.partial(connection_module.PeerWatch, poll_seconds=0.02)  # type: ignore[misc, assignment]
    environment = Environment.detect()
    connection = open_process_group(environment, "gloo")
    rank = environment.rank
    own, plan = random.Random(rank), random.Random(5)
    askers = [plan.sample(range(3), plan.choice([1, 1, 2, 3])) for _ in range(ROUNDS)]

    def run(point: SyncPoint, first_step: int, rounds: int) -> tuple[list[int], list[int]]:
        kept: list[int] = []
        asked_at: list[int] = []
        has_ended = threading.Event()

        def ask(*_: object) -> None:
            asked_at.append(len(kept))
            point.request()

        def ask_at_times() -> None:
            for number in range(rounds):
                while len(kept) < number:
                    if has_ended.wait(0.001):
                        return
                if rank in askers[number]:
                    time.sleep(own.random() * 0.1)
                    os.kill(os.getpid(), signal.SIGUSR1) if own.random() < 0.3 else ask()

        signal.signal(signal.SIGUSR1, ask)
        thread = threading.Thread(target=ask_at_times)
        thread.start()
        step, is_done = first_step, torch.zeros(1)
        while not is_done and step < first_step + 8_000:
            step += 1
            time.sleep(own.random() * 0.004)
            is_done.fill_(not thread.is_alive() and all(count < len(kept) for count in asked_at))
            dist.all_reduce(is_done, dist.ReduceOp.MIN)
            if point.is_reached(step):
                kept.append(step)
        has_ended.set()
        thread.join()
        return kept, asked_at

    kept, asked_at = run(connection.sync_point("stop"), 120, ROUNDS)
    unkept, other = connection.sync_point("stop"), connection.sync_point("save")
    if rank == 1:
        unkept.request()
        time.sleep(0.3)  # its watcher posts it, and no boundary comes
    del unkept
    later, _ = run(connection.sync_point("stop"), 0, 2)
    return {"kept": kept, "asked_at": asked_at, "later": later, "other": other.is_reached(1)}


def test_all_ranks_keep_every_sync_point_at_the_same_step(tmp_path: Path) -> None:
    results = run_job(reach_sync_points, 3, tmp_path)
    kept = results[0]["kept"]
    assert [result["kept"] for result in results] == [kept] * 3
    assert len(kept) >= ROUNDS
    assert kept == sorted(set(kept))
    assert kept[0] > 121
    for result in results:
        assert result["asked_at"]
        assert all(count < len(kept) for count in result["asked_at"])  # another was kept after every question
    later = results[0]["later"]
    assert [result["later"] for result in results] == [later] * 3
    assert len(later) >= 2
    assert not any(result["other"] for result in results)


class Device:
    """The training's collectives: one a step, joined by all ranks. A host may be `lead` steps ahead of them."""

    def __init__(self, world_size: int, lead: int) -> None:
        self._joined = [0] * world_size
        self._lead = lead
        self._changed = threading.Condition()
        self._seconds = deadline(60)

    def join(self, rank: int) -> None:
        with self._changed:
            self._joined[rank] += 1
            self._changed.notify_all()
        self.wait(rank, self._lead)

    def wait(self, rank: int, lead: int = 0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: min(self._joined) >= self._joined[rank] - lead, timeout=self._seconds)


class LateStore:
    """One connection to a store that sets values late, like torch's: `set` returns while the request is on its way.

    Requests of one connection are served in order, so every answer waits for earlier sets.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._sender = ThreadPoolExecutor(1)

    def set(self, key: str, value: bytes | str) -> None:
        self._sender.submit(self._deliver, key, value)

    def _deliver(self, key: str, value: bytes | str) -> None:
        time.sleep(self._seconds)
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        return self._sender.submit(self._store.get, key).result()

    def add(self, key: str, amount: int) -> Any:
        return self._sender.submit(self._store.add, key, amount).result()

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        return self._sender.submit(self._store.compare_set, key, expected, desired).result()

    def check(self, keys: list[str]) -> Any:
        return self._sender.submit(self._store.check, keys).result()

    def delete_key(self, key: str) -> Any:
        return self._sender.submit(self._store.delete_key, key).result()

    def clone(self) -> LateStore:
        return LateStore(self._store, self._seconds)


@pytest.mark.parametrize(("lead", "late_seconds"), [(0, 0.0), (12, 0.0), (0, 0.003)])
def test_ranks_agree_on_a_step_while_hosts_run_ahead(lead: int, late_seconds: float) -> None:
    """Every rank sends a request in every round. A device's collectives are queued, and the host does not wait for them."""
    world_size, rounds = 4, 40
    store, device = dist.HashStore(), Device(world_size, lead)
    connections = [
        [LateStore(store, late_seconds) if late_seconds else store for _ in range(2)] for _ in range(world_size)
    ]
    ended = threading.Event()

    def loop(rank: int) -> list[int]:
        chance = random.Random(rank)
        own, watched = connections[rank]
        book = SyncPoints(own, rank, world_size, synchronize=functools.partial(device.wait, rank))
        point, idle = book.make("stop"), book.make("idle")

        def watch() -> None:
            while not ended.wait(chance.random() * 0.01):
                book.poll(watched)

        watcher = threading.Thread(target=watch)
        watcher.start()
        kept: list[int] = []
        step = 0
        while step < 1500 or (len(kept) < 10 and step < 100_000):  # a busy machine's watchers look more rarely
            step += 1
            if chance.random() < 0.1:
                time.sleep(chance.random() * 0.004)
            device.join(rank)
            if point.is_reached(step):
                kept.append(step)
            assert not idle.is_reached(step)
            if step % 20 == 5 * rank and len(kept) < rounds:
                point.request()
        ended.set()
        watcher.join()
        return kept

    with ThreadPoolExecutor(world_size) as pool:
        kept = list(pool.map(loop, range(world_size)))
    assert kept == [kept[0]] * world_size
    assert len(kept[0]) >= 10
    assert store.num_keys() <= 3 * (world_size + 1)  # the keys of earlier rounds are deleted


def make_pair(store: Any = None) -> tuple[list[SyncPoints], Any]:
    store = store or dist.HashStore()
    return [SyncPoints(store, rank, 2) for rank in range(2)], store


def test_the_largest_post_is_the_agreed_step() -> None:
    books, store = make_pair()
    first, second = (book.make("stop") for book in books)
    second.request()
    for book in reversed(books):
        book.poll(store)
    assert not first.is_reached(7)  # posts 8
    assert not second.is_reached(7)
    assert first.is_reached(8)
    second.request()  # joins the round that this rank has not ended
    assert second.is_reached(8)
    for book in books:
        book.poll(store)
    assert [each.is_reached(9) for each in (first, second)] == [False, False]

    first.request()
    books[0].poll(store)
    assert not first.is_reached(9)  # posts 10
    assert not first.is_reached(9)  # a skipped step counts nothing
    books[1].poll(store)
    assert not second.is_reached(9)
    assert [each.is_reached(11) for each in (first, second)] == [True, True]  # the first boundary that is not before 10


def test_a_question_of_a_rank_that_is_a_round_ahead_is_found() -> None:
    books, store = make_pair()
    first, second = (book.make("stop") for book in books)
    first.request()
    for book in books:
        book.poll(store)
    assert [each.is_reached(1) for each in (first, second)] == [False, False]
    assert first.is_reached(2)
    first.request()  # the next round already
    books[0].poll(store)
    books[1].poll(store)  # sees the new count while still in the round before
    assert second.is_reached(2)
    books[1].poll(store)
    assert [each.is_reached(3) for each in (first, second)] == [False, False]
    assert [each.is_reached(4) for each in (first, second)] == [True, True]


def test_a_new_run_forgets_what_was_not_kept() -> None:
    books, store = make_pair()
    earlier = [book.make("stop") for book in books]
    earlier[0].request()
    books[0].poll(store)
    assert not earlier[0].is_reached(10)
    later = [book.make("stop") for book in books]
    for step in range(1, 20):
        for book in books:
            book.poll(store)
        assert [each.is_reached(step) for each in later] == [False, False]


def test_one_process_keeps_it_at_the_next_boundary() -> None:
    point = SyncPoints(None, 0, 1).make("stop")
    assert not point.is_reached(120)
    point.request()
    assert point.is_reached(121)
    assert not point.is_reached(122)
    connection = open_process_group(Environment(), "gloo")
    again = connection.sync_point("stop")
    again.request()
    assert again.is_reached(0)


class CountingStore:
    """Counts the calls of a real store."""

    def __init__(self, store: Any) -> None:
        self.calls: Counter[str] = Counter()
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.calls[name] += 1
        call: Callable[..., Any] = getattr(self._store, name)
        return call


def test_a_sync_point_is_almost_free_without_a_request() -> None:
    loop_store, watch_store = (CountingStore(dist.HashStore()) for _ in range(2))
    books, _ = make_pair(loop_store)
    books[0].poll(watch_store)
    assert not watch_store.calls  # no point, no look
    points = [books[0].make("stop"), books[0].make("save")]
    for step in range(100):
        books[0].poll(watch_store)
        assert not any(each.is_reached(step) for each in points)
    assert not loop_store.calls
    assert watch_store.calls == {"add": 100, "check": 2}  # every rank looks once at the beginning
