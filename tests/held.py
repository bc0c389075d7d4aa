"""A file system whose writes a test can hold up, or let fail: local files under held://, without a rename."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from deadlines import deadline
from fsspec.implementations.local import LocalFileSystem


class HeldFiles(LocalFileSystem):
    protocol = "held"
    gate = threading.Event()
    """Files are opened for writing while it is set."""
    waits = threading.Event()
    """Set when a writer has come to the gate."""
    is_full = False
    writers: set[str] = set()
    """The threads that have opened a file for writing."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("held://"))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode:
            type(self).writers.add(threading.current_thread().name)
            type(self).waits.set()
            assert type(self).gate.wait(deadline(60))
            if type(self).is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
        return super()._open(path, mode, **kwargs)


fsspec.register_implementation("held", HeldFiles, clobber=True)


@contextmanager
def held(is_shut: bool = True) -> Iterator[type[HeldFiles]]:
    """Shut the gate, or leave it to the test. It is open before and afterwards."""
    if is_shut:
        HeldFiles.gate.clear()
    HeldFiles.waits.clear()
    HeldFiles.writers.clear()
    try:
        yield HeldFiles
    finally:
        HeldFiles.is_full = False
        HeldFiles.gate.set()


HeldFiles.gate.set()
