"""Agreement of ranks: values of all, rank 0's decisions, failures of one rank, and the order of a block."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from trainwright.distributed.ranks import Ranks
from trainwright.distributed.store_channel import StoreChannel
from trainwright.errors import CheckpointError, MissingCheckpoint


def run_ranks(world_size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """Run the work in threads that stand for ranks; return their results or errors."""
    store: Any = dist.HashStore()

    def attempt(rank: int) -> Any:
        try:
            return work(Ranks(StoreChannel(store, rank, world_size), 120.0))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(attempt, range(world_size)))


def test_values_are_exchanged_and_broadcast() -> None:
    def work(ranks: Ranks) -> Any:
        ranks.wait("a test")
        return ranks.exchange({"rank": ranks.rank}, "a test"), ranks.broadcast(f"of {ranks.rank}", "a test")

    assert run_ranks(3, work) == [([{"rank": 0}, {"rank": 1}, {"rank": 2}], "of 0")] * 3


def test_one_process_needs_no_store() -> None:
    ranks = Ranks()
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.exchange([1], "a test") == [[1]]
    assert ranks.decide(lambda: "x", "a test") == "x"
    assert ranks.run_on_all(lambda: 2, "a test") == [2]
    assert ranks.differing("x", "a test") == []


def test_only_values_that_differ_are_sent() -> None:
    assert run_ranks(2, lambda ranks: ranks.differing({"a": 1}, "a test")) == [[]] * 2
    assert run_ranks(2, lambda ranks: ranks.differing({"a": ranks.rank}, "a test")) == [[{"a": 0}, {"a": 1}]] * 2


@pytest.mark.parametrize("kind", [ValueError, CheckpointError, MissingCheckpoint])
def test_rank_0_decides_for_all(kind: type[Exception]) -> None:
    def fail() -> None:
        raise kind("not here")

    assert run_ranks(3, lambda ranks: ranks.decide(lambda: ranks.rank, "a test")) == [0] * 3
    assert run_ranks(3, lambda ranks: ranks.decide(fail, "a test")) == [f"{kind.__name__}: not here"] * 3


def test_a_failure_of_one_rank_is_raised_on_all() -> None:
    def work(ranks: Ranks) -> Any:
        def part() -> int:
            if ranks.rank > 0:
                raise OSError(f"no disk on {ranks.rank}")
            return ranks.rank

        return ranks.run_on_all(part, "a test", subject="x was not written")

    def look(ranks: Ranks) -> Any:
        def part() -> None:
            raise MissingCheckpoint("x does not exist")

        return ranks.run_on_all(part, "a test")

    assert run_ranks(3, look) == ["MissingCheckpoint: x does not exist"] * 3
    text = "CheckpointError: x was not written: rank 1: OSError: no disk on 1 (ranks 2 failed too)"
    assert run_ranks(3, work) == [text] * 3


def test_a_failure_of_all_ranks_names_none() -> None:
    def part() -> None:
        raise CheckpointError("damaged")

    assert run_ranks(2, lambda ranks: ranks.run_on_all(part, "a test")) == ["CheckpointError: damaged"] * 2
    found = run_ranks(2, lambda ranks: ranks.run_on_all(part, "a test", describe=lambda error: f"<{error}>"))
    assert found == ["CheckpointError: <damaged>"] * 2


def test_only_first_returns_the_results_on_rank_0() -> None:
    def work(ranks: Ranks) -> Any:
        own = (lambda: "made") if ranks.rank == 0 else None
        return ranks.run_on_all(own, "a test", only_first=True)

    assert run_ranks(2, work) == [["made", None], [None, None]]


def test_the_first_ranks_run_a_block_before_the_others() -> None:
    order: list[int] = []

    def work(ranks: Ranks) -> None:
        with ranks.first(ranks.rank == 1):
            if ranks.rank == 1:
                time.sleep(0.05)
            order.append(ranks.rank)

    assert run_ranks(3, work) == [None] * 3
    assert order[0] == 1


def test_a_thread_has_a_call_order_of_its_own() -> None:
    def work(ranks: Ranks) -> Any:
        saves = ranks.subchannel("saves")
        if ranks.rank == 0:
            return ranks.exchange("main", "a test"), saves.exchange("thread", "a save")
        with ThreadPoolExecutor(1) as pool:
            thread = pool.submit(saves.exchange, "thread", "a save")
            return ranks.exchange("main", "a test"), thread.result()

    assert run_ranks(2, work) == [(["main", "main"], ["thread", "thread"])] * 2
