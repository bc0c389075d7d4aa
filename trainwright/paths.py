"""Paths that do not depend on the working directory, and the identity of the process that wrote a file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from pathlib import Path

__all__ = ["absolute"]


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a local path as an absolute one, with `~` expanded, and a URL unchanged. ValueError for a path with "::"."""
    text = os.path.expanduser(os.fspath(path))
    if "::" in text and "://" not in text:
        raise ValueError(
            f"the path {text!r} has '::', which fsspec reads as a chain of file systems. Choose a name without it."
        )
    return text if "://" in text else os.path.abspath(text)


def machine() -> str:
    """Return an identifier of this machine and its namespace of process ids, for file names and records."""
    # Containers may share a host name. The namespace of process ids then differs.
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def process_start_time(pid: int) -> str:
    """Return when a process of this machine started, or empty if it has ended."""
    # Process ids are reused, so the start time (ticks since boot) is stored with them, or "0" if unknown.
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]  # a zombie no longer writes
    return "0"


def is_process_alive(pid: int, start: str) -> bool:
    """Return whether the process of this machine with this id and start time is alive."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's process: the id is in use
        pass
    return process_start_time(pid) == start
