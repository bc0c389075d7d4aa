"""The ranks of benchmarks/scale.py: threads of several processes, which run the package's code over a real TCPStore."""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trainwright.distributed.ranks import Ranks
from trainwright.distributed.store_channel import RankPositions, StoreChannel
from trainwright.distributed.sync_points import SyncPoint, SyncPoints

RANKS_OF_A_PROCESS = 64
LEAD_SECONDS = 0.3
"""From the order of a measurement to its start, so that all ranks wait for the start."""


class Rank(NamedTuple):
    """One simulated rank, with a connection to the store."""

    rank: int
    world_size: int
    store: Any
    ranks: Ranks
    positions: RankPositions
    points: SyncPoints
    stop: SyncPoint

    @classmethod
    def of(cls, rank: int, world_size: int, store: Any) -> Rank:
        points = SyncPoints(store, rank, world_size)
        ranks = Ranks(StoreChannel(store, rank, world_size), 600.0)
        return cls(rank, world_size, store, ranks, RankPositions(rank), points, points.make("stop"))


Work = Callable[[Rank], Any]
"""The part of one rank in a measurement. A function of a module, because it is sent to the processes."""


class Cost(NamedTuple):
    """The cost of a measurement."""

    seconds: float
    """Until the last rank has ended."""
    server_seconds: float
    """CPU time of the store's server."""
    first_seconds: float
    """CPU time of rank 0, which collects the results."""
    rank_seconds: float
    """CPU time of another rank, the median."""


class Job:
    """A store's server, and processes that each run some ranks as threads. A context manager, which ends the processes."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        context = multiprocessing.get_context("fork")
        gc.freeze()
        self._server, self._ends, self._processes = -1, [], []
        self._start(context, _serve)
        self._port = int(self._ends[0].recv())
        for first in range(0, world_size, RANKS_OF_A_PROCESS):
            numbers = range(first, min(first + RANKS_OF_A_PROCESS, world_size))
            self._start(context, partial(_run_ranks, numbers=numbers, world_size=world_size, port=self._port))
        for end in self._ends[1:]:
            end.recv()

    def _start(self, context: Any, target: Callable[..., None]) -> None:
        here, there = context.Pipe()
        process = context.Process(target=target, args=(there,), daemon=True)
        process.start()
        self._ends.append(here)
        self._processes.append(process)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.join()

    def measure(self, work: Work) -> Cost:
        """Start the work on all ranks at once, and return its cost."""
        server, *processes = self._ends
        before = self._ask(server)
        begins = time.monotonic() + LEAD_SECONDS
        for end in processes:
            end.send((work, begins))
        ended, (first, *others) = zip(*(pair for end in processes for pair in end.recv()), strict=True)
        return Cost(max(ended) - begins, self._ask(server) - before, first, statistics.median(others))

    def _ask(self, server: Any) -> float:
        server.send(None)
        return float(server.recv())


def _serve(end: Any) -> None:
    """Host the store, and report the CPU time of this process."""
    store: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    end.send(store.port)
    while True:
        end.recv()
        end.send(time.process_time())


def _run_ranks(end: Any, numbers: Sequence[int], world_size: int, port: int) -> None:
    """Run work that comes through the pipe on some ranks. Report the end and the CPU time of each."""
    torch.set_num_threads(1)

    def connected(number: int) -> Rank:
        options = {"timeout": timedelta(minutes=5), "wait_for_workers": False}
        store: Any = dist.TCPStore("127.0.0.1", port, None, False, **options)
        return Rank.of(number, world_size, store)

    def timed(work: Work, begins: float, rank: Rank) -> tuple[float, float]:
        time.sleep(max(0.0, begins - time.monotonic()))
        before = time.thread_time()
        work(rank)
        return time.monotonic(), time.thread_time() - before

    with ThreadPoolExecutor(len(numbers)) as pool:
        # At once, because torch looks up the name of the other end, which takes seconds where no name server answers.
        ranks = list(pool.map(connected, numbers))
        end.send(None)
        while True:
            work, begins = end.recv()
            end.send(list(pool.map(partial(timed, work, begins), ranks)))
