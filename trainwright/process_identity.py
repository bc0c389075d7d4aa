"""Which process wrote something, so that others can see whether it still lives: its machine, its id and when it started."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from pathlib import Path


def machine() -> str:
    """Return an identifier of this machine and its namespace of process ids, for file names and records."""
    # Containers may share a host name; the namespace of process ids then differs.
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def process_start_time(pid: int) -> str:
    """Return when a process of this machine started; empty if it has ended."""
    # Process ids are reused, so the start time (ticks since boot) is stored with them; "0" if unknown.
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
