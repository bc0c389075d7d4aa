"""Temporary directories: their names record the process that writes there, and those of dead writers are swept."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import time
import uuid

from trainwright.checkpoint.filesystem import resolve

# .<name>.tmp-<machine>-<pid>-<start of the process>-<unique>: one mkdir also records the writer.
_TEMPORARY = re.compile(r"\..+\.tmp-([0-9a-f]{8})-(\d+)-(\d+)-[0-9a-f]{12}", re.ASCII | re.DOTALL)
FOREIGN_SECONDS = 86400.0


def temporary_path(path: str) -> str:
    """Return an unused name in the directory of a path, which records the process."""
    parent, name = os.path.split(path)
    pid = os.getpid()
    return f"{parent}/.{name}.tmp-{machine()}-{pid}-{process_start_time(pid)}-{uuid.uuid4().hex[:12]}"


def machine() -> str:
    """Return an identifier of this machine and its namespace of process ids, for file names."""
    # Containers may share a host name; the namespace of process ids then differs.
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def process_start_time(pid: int) -> str:
    """Return when a process of this machine started; empty if it has ended."""
    # Process ids are reused, so the start time (ticks since boot) is stored with them; "0" if unknown.
    with contextlib.suppress(OSError, IndexError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]  # a zombie no longer writes
    return "0"


def is_process_alive(pid: int, start: str) -> bool:
    """Return whether the process of this machine with this id and start time is alive."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return process_start_time(pid) == start


def sweep_temporaries(directory: str) -> list[str]:
    """Remove the temporary directories of dead writers, and return their names.

    Whether a process on another machine or in another container is alive cannot be seen, so its directories are kept for a day
    after the last write.
    """
    files, inside = resolve(directory)
    if not files.has_rename or not os.path.isdir(inside):
        return []
    swept = []
    for name, size in sorted(files.listing(inside).items()):
        match = _TEMPORARY.fullmatch(name)
        path = f"{inside}/{name}"
        if match is None or size is not None or os.path.islink(path):
            continue
        is_here = match[1] == machine()
        if not is_process_alive(int(match[2]), match[3]) if is_here else _age(path) > FOREIGN_SECONDS:
            with contextlib.suppress(OSError):  # no reason to end a run
                files.remove_tree(path)
                swept.append(name)
    return swept


def _age(directory: str) -> float:
    """Return the seconds since the latest change in a directory; 0 if unknown."""
    try:
        with os.scandir(directory) as entries:
            times = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return time.time() - max(times, default=os.stat(directory).st_mtime)
    except OSError:
        return 0.0
