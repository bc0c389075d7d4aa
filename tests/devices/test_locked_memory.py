"""Locked memory is as large as was asked for, and is unlocked before it is unmapped."""

from __future__ import annotations

import gc
import os
import sys

import pytest
import torch

from trainwright.devices import cuda
from trainwright.devices.locked_memory import LockedMemory

SIZE = 9_000_001


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The sizes that the driver would have locked, by address."""
    held: dict[int, int] = {}

    def lock(address: int, size: int) -> bool:
        held[address] = size
        return True

    monkeypatch.setattr(cuda, "lock_pages", lock)
    monkeypatch.setattr(cuda, "unlock_pages", held.pop)
    return held


@pytest.mark.skipif(sys.platform == "win32", reason="memory of whole pages is asked for in another way there")
def test_pages_are_locked_where_they_lie(locked: dict[int, int]) -> None:
    memory = LockedMemory(SIZE, "cuda")
    assert locked == {memory.tensor.data_ptr(): SIZE}
    assert memory.tensor.data_ptr() % os.sysconf("SC_PAGE_SIZE") == 0
    assert (memory.tensor.numel(), memory.tensor.dtype) == (SIZE, torch.uint8)
    view = memory.tensor[8:16].view(torch.float64)
    view.fill_(0.5)
    memory.release()
    assert locked == {}
    assert memory.tensor.numel() == 0
    assert view.item() == 0.5  # whoever still looks at it may
    memory.release()


@pytest.mark.skipif(sys.platform == "win32", reason="memory of whole pages is asked for in another way there")
def test_memory_that_is_dropped_is_unlocked(locked: dict[int, int]) -> None:
    memory = LockedMemory(SIZE, "cuda")
    assert len(locked) == 1
    del memory
    gc.collect()
    assert locked == {}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_is_given_back_is_the_systems_again(locked: dict[int, int]) -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    memory = LockedMemory(64 << 20, "cuda")
    memory.tensor.fill_(1)
    assert resident() - before > 60 << 20
    memory.release()
    gc.collect()
    assert resident() - before < 8 << 20


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch has an accelerator here, whose memory it can lock")
def test_what_the_driver_refuses_is_asked_of_torch(locked: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "lock_pages", lambda address, size: False)
    with pytest.raises(RuntimeError, match=r"pin|NVIDIA driver"):  # as torch was built
        LockedMemory(SIZE, "cuda")
