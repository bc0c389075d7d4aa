"""Locked memory: host memory whose pages stay where they are, so that a device copies into it by itself."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from trainwright.devices import cuda

KEPT_BY_TORCH = (cuda.NAME, "xpu")
"""Devices of whose freed memory torch keeps blocks for the next; asked to let go of another's, it ends the process."""


class LockedMemory:
    """Bytes of page-locked host memory, until they are given back.

    torch's own allocator of such memory rounds up to a power of two (9 GB take 16) and keeps what is freed. On CUDA plain
    memory of the size that is asked for is locked where it lies; elsewhere torch's allocator has the only way.

    Args:
        size: how many bytes.
        device_type: the kind of device that copies into it.
    """

    def __init__(self, size: int, device_type: str) -> None:
        self._device_type = device_type
        self._unlock: weakref.finalize[..., LockedMemory] | None = None
        area = _pages(size) if device_type == cuda.NAME and size else None
        self.tensor: Tensor = torch.empty(0, dtype=torch.uint8)
        """The memory, as a row of bytes."""
        if area is not None:
            self.tensor = torch.frombuffer(area, dtype=torch.uint8, count=size)
            address = self.tensor.data_ptr()
            if cuda.lock_pages(address, size):
                # It holds the memory: pages that are unmapped while they are locked stay locked for good.
                self._unlock = weakref.finalize(self, _unlock, address, area, os.getpid())
                self._unlock.atexit = False  # the process gives all back at its end, and the driver may be gone by then
                return
        self.tensor = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def release(self) -> None:
        """Give the memory back. Copies into it have to be done."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if self._unlock is not None:
            self._unlock()
        elif self._device_type in KEPT_BY_TORCH and hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()


def _pages(size: int) -> mmap.mmap | None:
    """Return so many bytes of memory that begins and ends with a page; None where there is no such way (Windows)."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return None
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        # A forked loader worker would share the pages, and the next write here would get others than the device writes to.
        with suppress(AttributeError, OSError):  # not of every system, nor of every kernel
            area.madvise(getattr(mmap, advice))
    return area


def _unlock(address: int, area: mmap.mmap, pid: int) -> None:
    if os.getpid() == pid:  # a forked process has neither the pages nor the device
        cuda.unlock_pages(address)
