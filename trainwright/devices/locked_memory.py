"""Locked memory: host memory whose pages stay in place, so that a device can copy into it asynchronously."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from trainwright.devices import cuda

KEPT_BY_TORCH = (cuda.NAME, "xpu")
"""Devices whose freed host memory torch caches. For another device, a request to empty the cache ends the process."""


class LockedMemory:
    """A number of bytes of page-locked host memory, until they are released.

    torch's allocator of such memory rounds up to a power of two (9 GB take 16) and caches freed memory. On CUDA, plain memory
    of the requested size is locked in place. Elsewhere only torch's allocator can do it.
    """

    def __init__(self, size: int, device_type: str) -> None:
        self._device_type = device_type
        self._unlock: weakref.finalize[..., LockedMemory] | None = None
        self.tensor: Tensor
        """The memory, as a row of bytes."""
        if device_type == cuda.NAME and size:
            area = _pages(size)
            self.tensor = torch.frombuffer(area, dtype=torch.uint8, count=size)
            address = self.tensor.data_ptr()
            if cuda.lock_pages(address, size):
                # The finalizer keeps the memory alive, because pages that are unmapped while locked stay locked forever.
                self._unlock = weakref.finalize(self, _unlock, address, area, os.getpid())
                self._unlock.atexit = False  # the end of the process frees it, when the driver may be gone
                return
        self.tensor = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def release(self) -> None:
        """Release the memory. Copies into it must have finished."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if self._unlock is not None:
            self._unlock()
        elif self._device_type in KEPT_BY_TORCH and hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()


def _pages(size: int) -> mmap.mmap:
    """Return page-aligned memory of this size."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        # If a forked loader worker shared the pages, the next write here would move them away from the device's.
        with suppress(AttributeError, OSError):  # not on every system or kernel
            area.madvise(getattr(mmap, advice))
    return area


def _unlock(address: int, area: mmap.mmap, pid: int) -> None:
    if os.getpid() == pid:  # a forked process has neither the pages nor the device
        cuda.unlock_pages(address)
