"""Checkpoints whose every part tells its step, written by threads that stand for ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from deadlines import deadline

from trainwright.checkpoint.contents import collect
from trainwright.checkpoint.reader import StoredCheckpoint
from trainwright.checkpoint.store import write_checkpoint
from trainwright.checkpoint.tensors import Piece
from trainwright.distributed.ranks import Ranks


class Meeting:
    """Exchanges between threads that stand for ranks."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=deadline(20))
        self.payloads = [b""] * world_size

    def exchange(self, rank: int, payload: bytes) -> list[bytes]:
        self.payloads[rank] = payload
        self.barrier.wait()
        replies = list(self.payloads)
        self.barrier.wait()
        return replies


class Seat:
    """One rank's end of a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.world_size = meeting, rank, len(meeting.payloads)

    def exchange(
        self, payload: bytes, *, call: str, timeout_seconds: float, for_first: bytes | None = None
    ) -> list[bytes]:
        return self.meeting.exchange(self.rank, payload + (for_first or b""))


def write_step(path: Path | str, step: int = 1, world_size: int = 1, overwrite: bool = False) -> list[Exception | None]:
    """Write a checkpoint with its step in every part, and return the ranks' errors."""
    meeting = Meeting(world_size)

    sections = {"model": [Piece(f"w{i}", (3, 2), 0, torch.full((3, 2), float(step + i))) for i in range(2)]}
    state = {"step": step, "ema": torch.full((2,), float(step))}

    def write(rank: int) -> None:
        write_checkpoint(
            str(path),
            lambda: collect(sections, state, {"rank": rank, "step": step}, rank, world_size),
            header={"step": step, "epoch": step // 10, "strategy": "ddp"},
            ranks=Ranks(Seat(meeting, rank)),
            overwrite=overwrite,
        )

    if world_size == 1:
        write(0)
        return [None]
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(write, rank) for rank in range(world_size)]
    return [future.exception() for future in futures]  # type: ignore[misc]


def check_step(checkpoint: StoredCheckpoint, step: int) -> None:
    """Assert that every part is of that step."""
    assert (checkpoint.step, checkpoint.epoch, checkpoint.header["strategy"]) == (step, step // 10, "ddp")
    for index in range(2):
        assert torch.equal(checkpoint.read_tensor("model", f"w{index}"), torch.full((3, 2), float(step + index)))
    state = checkpoint.run_state()
    assert state["step"] == step
    assert torch.equal(state["ema"], torch.full((2,), float(step)))
    for rank in range(checkpoint.world_size):
        assert checkpoint.rank_state(rank) == {"rank": rank, "step": step}


@pytest.fixture
def save() -> Callable[..., list[Exception | None]]:
    """Writes the checkpoint of a step."""
    return write_step


@pytest.fixture
def check() -> Callable[[StoredCheckpoint, int], None]:
    """Asserts that a checkpoint is wholly of a step."""
    return check_step


@pytest.fixture
def seats() -> Callable[[int], list[Ranks]]:
    """Makes the ends of a meeting of so many ranks."""

    def make(world_size: int) -> list[Ranks]:
        meeting = Meeting(world_size)
        return [Ranks(Seat(meeting, rank)) for rank in range(world_size)]

    return make
