"""Huge pages for a process that forks others: a fork copies its page table, which has an entry per page.

With torch and a thousand tests loaded, a fork and the end of the forked process take a third of the time on huge pages.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_SIZE = 2 << 20
_MADV_COLLAPSE = 25
"""Linux 6.1 and later, as madvise(2) says."""


def collapse() -> None:
    """Join the present pages of this process into huge ones, if the kernel can."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    for line in maps.read_text().splitlines():
        addresses, rights, *_, inode_or_name = line.split()
        if rights.startswith("rw") and inode_or_name in ("0", "[heap]"):  # memory without a file behind it
            first, last = (int(each, 16) for each in addresses.split("-"))
            first, last = -(-first // _SIZE) * _SIZE, last // _SIZE * _SIZE
            if first < last:
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_COLLAPSE)
