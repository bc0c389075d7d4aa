"""Measure agreement, commits and the data order for many ranks, and reads of large and of many checkpoints.

The ranks are threads of one process, each with its own connections to a real TCPStore, so their figures include the time of
all their Python code on this machine.

    python benchmarks/scale.py [--ranks 64,256,1024] [--tensors 100000] [--checkpoints 10000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler

from trainwright.checkpoint.discovery import latest_checkpoint
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.checkpoint.store import write_checkpoint
from trainwright.checkpoint.tensors import Piece
from trainwright.data.index_stream import IndexStream
from trainwright.distributed.ranks import Ranks
from trainwright.distributed.store_channel import StoreChannel
from trainwright.distributed.sync_points import SyncPoints

BATCH_SIZE, BATCHES = 32, 50


class Job:
    """Ranks as threads that wait for one another before each measurement."""

    def __init__(self, world_size: int) -> None:
        self._server: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._pool, self._barrier = ThreadPoolExecutor(world_size), threading.Barrier(world_size)
        self.world_size = world_size
        self.stores = [self._connect() for _ in range(world_size)]
        self.ranks = [Ranks(StoreChannel(store, rank, world_size), 600.0) for rank, store in enumerate(self.stores)]

    def _connect(self) -> Any:
        options = {"timeout": timedelta(minutes=5), "wait_for_workers": False}
        return dist.TCPStore("127.0.0.1", self._server.port, None, False, **options)

    def seconds(self, work: Callable[[int], Any]) -> float:
        """Return the seconds until the last rank has done its work."""

        def timed(rank: int) -> tuple[float, float]:
            self._barrier.wait()
            began = time.perf_counter()
            work(rank)
            return began, time.perf_counter()

        times = list(self._pool.map(timed, range(self.world_size)))
        return max(ended for _, ended in times) - min(began for began, _ in times)


def agreement(job: Job) -> float:
    return job.seconds(lambda rank: job.ranks[rank].exchange(rank % 7 == 0, "a stop"))


def stop(job: Job) -> float:
    """Let every rank reach the boundary on which all ranks agree."""
    points = [SyncPoints(store, rank, job.world_size).make("stop") for rank, store in enumerate(job.stores)]
    for point in points:
        point.is_pending = True

    def reach(rank: int) -> None:
        step = 0
        while not points[rank].is_reached(step):
            step = 1
            time.sleep(0.01)

    return job.seconds(reach)


def commit(job: Job) -> float:
    folder = Path(tempfile.mkdtemp())

    def write(rank: int) -> None:
        pieces = [Piece(f"weight{i}", (job.world_size * 8,), rank * 8, torch.ones(8), rank) for i in range(20)]
        header = {"step": 1, "epoch": 0}
        sections = {"model": pieces}
        write_checkpoint(
            str(folder / "a.ckpt"), sections=sections, state={}, rank_state={}, header=header, ranks=job.ranks[rank]
        )

    try:
        return job.seconds(write)
    finally:
        shutil.rmtree(folder)


def data_order(world_size: int) -> float:
    """Return the seconds for the indices of one batch of one rank."""
    source = BatchSampler(RandomSampler(range(BATCH_SIZE * BATCHES * world_size)), BATCH_SIZE, False)
    stream = IndexStream(
        source,
        batched=True,
        rank=world_size - 1,
        world_size=world_size,
        mode="train",
        cycles=False,
        seed_rank=0,
        same_on_ranks=True,
        gives_seeds=False,
    )
    stream.set_epoch(0, 0)
    batches = iter(stream)
    next(batches)
    began = time.perf_counter()
    count = sum(1 for _ in batches)
    return (time.perf_counter() - began) / count


def write_alone(path: Path, count: int, step: int = 1) -> None:
    pieces = [Piece(f"block{i // 10}.weight{i}", (2,), 0, torch.ones(2)) for i in range(count)]
    header = {"step": step, "epoch": 0}
    write_checkpoint(str(path), sections={"model": pieces}, state={}, rank_state=None, header=header, ranks=Ranks())


def reads(folder: Path, tensors: int, checkpoints: int) -> list[tuple[str, Callable[[], Any]]]:
    """Return the measurements of one process that reads checkpoints."""
    large, many = folder / "large.ckpt", folder / "many"
    write_alone(large, tensors)
    write_alone(many / "step=0.ckpt", 1)
    for step in range(1, checkpoints):
        shutil.copytree(many / "step=0.ckpt", many / f"step={step}.ckpt")
    return [
        (f"open a checkpoint of {tensors:,} tensors", lambda: open_checkpoint(str(large), "size")),
        (f"find the newest of {checkpoints:,} checkpoints", lambda: latest_checkpoint(str(many))),
    ]


def report(rounds: int, name: str, measure: Callable[[], float]) -> None:
    """Print the median, the least and the most milliseconds of a measurement."""
    measure()
    seconds = sorted(measure() for _ in range(rounds))
    figures = statistics.median(seconds), seconds[0], seconds[-1]
    middle, least, most = (f"{figure * 1e3:.3f}" for figure in figures)
    print(f"{name:40s} {middle:>10s} ms ({least} to {most})", flush=True)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,256,1024", help="numbers of ranks, comma-separated")
    parser.add_argument("--tensors", type=int, default=100_000, help="tensors of the large checkpoint")
    parser.add_argument("--checkpoints", type=int, default=10_000, help="checkpoints in one folder")
    parser.add_argument("--rounds", type=int, default=5, help="measurements; the median counts")
    parser.add_argument(
        "--all-at-once", action="store_true", help="every rank reads every post, as in a job of 32 ranks"
    )
    options = parser.parse_args(arguments)
    if options.all_at_once:
        StoreChannel.group_size = 1 << 20
    for world_size in map(int, options.ranks.split(",")):
        job = Job(world_size)
        show = partial(report, options.rounds)
        for measure in (agreement, stop, commit):
            show(f"{world_size} ranks: {measure.__name__}", partial(measure, job))
        show(f"{world_size} ranks: the indices of a batch", partial(data_order, world_size))
    folder = Path(tempfile.mkdtemp())
    try:
        for name, work in reads(folder, options.tensors, options.checkpoints):
            show(name, partial(timed, work))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
