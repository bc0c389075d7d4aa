"""Measure agreement, commits and the data order for many ranks, and reads of large and of many checkpoints.

The ranks are threads of a few processes (scale_job.py), each with its own connection to a real TCPStore. They run the package's
code, so on a machine with fewer cores than ranks a measurement takes the CPU time of all. The output therefore also shows the
CPU time of the store's server, of rank 0 and of another rank, which take place one after another in a job on many machines.

    python benchmarks/scale.py [--ranks 64,256,1024] [--tensors 100000] [--checkpoints 10000] [--rounds 5] [--picture PATH]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scale_job import Cost, Job, Rank, Work
from scale_picture import draw
from torch.utils.data import BatchSampler, RandomSampler

from trainwright.checkpoint.contents import collect
from trainwright.checkpoint.discovery import find_checkpoints
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.checkpoint.store import write_checkpoint
from trainwright.checkpoint.tensors import Piece
from trainwright.data.index_stream import IndexStream
from trainwright.distributed.failures import FailureLog
from trainwright.distributed.ranks import Ranks
from trainwright.distributed.store_channel import StoreChannel

NAMES = ("agreement", "stop", "watch", "commit")
BATCH_SIZE, BATCHES = 32, 50
STEP_SECONDS = 0.01


def agreement(rank: Rank) -> None:
    rank.ranks.exchange(rank.rank % 7 == 0, "a stop")


def stop(rank: Rank) -> None:
    """Reach the boundary on which all ranks agree."""
    rank.stop.is_pending = True
    step = 0
    while not rank.stop.is_reached(step):
        step = 1
        time.sleep(STEP_SECONDS)


def watch(rank: Rank) -> None:
    """Make the requests of one poll of a watcher thread."""
    FailureLog(rank.store).count()
    rank.store.check(["closing"])
    rank.positions.answer(rank.store)
    rank.points.poll(rank.store)


def commit(path: str, rank: Rank) -> None:
    pieces = [Piece(f"weight{i}", (rank.world_size * 8,), rank.rank * 8, torch.ones(8), rank.rank) for i in range(20)]
    header, sections = {"step": 1, "epoch": 0}, {"model": pieces}
    gather = partial(collect, sections, {}, {}, rank.rank, rank.world_size)
    write_checkpoint(path, gather, header, rank.ranks)


def work_of(name: str, folder: Path) -> Work:
    works: dict[str, Work] = {"agreement": agreement, "stop": stop, "watch": watch}
    return works.get(name) or partial(commit, str(folder / f"{time.monotonic_ns()}.ckpt"))


def data_order(world_size: int) -> tuple[float, float]:
    """Return the seconds for the indices of one batch of one rank, and of the last batch of an epoch."""
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
    seconds = [timed(partial(next, batches)) for _ in range(BATCHES - 1)]
    return statistics.median(seconds), seconds[-1]


def write_alone(path: Path, count: int, step: int = 1) -> None:
    pieces = [Piece(f"block{i // 10}.weight{i}", (2,), 0, torch.ones(2)) for i in range(count)]
    gather = partial(collect, {"model": pieces}, {}, None, 0, 1)
    write_checkpoint(str(path), gather, {"step": step, "epoch": 0}, Ranks())


def reads(folder: Path, tensors: int, checkpoints: int) -> list[tuple[str, Callable[[], Any]]]:
    """Return the measurements of one process that reads checkpoints."""
    large, many = folder / "large.ckpt", folder / "many"
    write_alone(large, tensors)
    write_alone(many / "step=0.ckpt", 1)
    for step in range(1, checkpoints):
        shutil.copytree(many / "step=0.ckpt", many / f"step={step}.ckpt")
    return [
        (f"open a checkpoint of {tensors:,} tensors", lambda: open_checkpoint(str(large), "size")),
        (f"find the newest of {checkpoints:,} checkpoints", lambda: find_checkpoints(str(many))[-1]),
    ]


def report(name: str, figures: Sequence[float], note: str = "") -> None:
    """Print the median, the least and the most milliseconds of a measurement."""
    middle, least, most = (f"{figure * 1e3:.3f}" for figure in (statistics.median(figures), min(figures), max(figures)))
    print(f"{name:40s} {middle:>10s} ms ({least} to {most}){note}", flush=True)


def report_job(world_size: int, rounds: int, folder: Path) -> dict[str, Cost]:
    """Measure a job, print the costs and return their medians by name."""
    medians = {}
    with Job(world_size) as job:
        for name in NAMES:
            job.measure(work_of(name, folder))
            costs = [job.measure(work_of(name, folder)) for _ in range(rounds)]
            medians[name] = Cost(*map(statistics.median, zip(*costs, strict=True)))
            parts = zip(("server", "rank 0", "another rank"), medians[name][1:], strict=True)
            note = ", ".join(f"{part} {seconds * 1e3:.3f} ms" for part, seconds in parts)
            report(f"{world_size} ranks: {name}", [cost.seconds for cost in costs], f"; CPU time: {note}")
    return medians


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
    parser.add_argument("--picture", type=Path, help="an SVG to draw")
    parser.add_argument(
        "--all-at-once", action="store_true", help="every rank reads every post, as in a job of 32 ranks"
    )
    options = parser.parse_args(arguments)
    if options.all_at_once:
        StoreChannel.group_size = 1 << 20
    # Torch looks up the names of the connections' ends, and waits for a name server that does not answer.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    folder, costs = Path(tempfile.mkdtemp()), {}
    try:
        for world_size in map(int, options.ranks.split(",")):
            costs[world_size] = report_job(world_size, options.rounds, folder)
            orders = [data_order(world_size) for _ in range(options.rounds)]
            for name, figures in zip(("a batch", "an epoch's last batch"), zip(*orders, strict=True), strict=True):
                report(f"{world_size} ranks: the indices of {name}", figures)
        for name, work in reads(folder, options.tensors, options.checkpoints):
            work()
            report(name, [timed(work) for _ in range(options.rounds)])
        if options.picture:
            draw(options.picture, costs)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
