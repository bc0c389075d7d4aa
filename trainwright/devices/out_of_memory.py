"""Kills by the kernel's out-of-memory killer, which the cgroup of this process counts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

COUNTERS = {"": ("/sys/fs/cgroup", "memory.events"), "memory": ("/sys/fs/cgroup/memory", "memory.oom_control")}
"""The folders and files of versions 2 and 1, by a group's controller in /proc/self/cgroup."""


class OutOfMemoryKills:
    """The kills since this object was made."""

    def __init__(self) -> None:
        self._before = count_kills()

    def describe(self) -> str:
        """Return the reason of a kill and the remedies in words, or "" if there was no such kill or it is unknown."""
        kills = count_kills() - self._before
        count = f"{kills} kill{'s' * (kills > 1)} in this cgroup since the start"
        reason = f" of the out-of-memory killer, {count}; take a smaller batch, fewer loader workers or more memory"
        return reason if kills > 0 else ""


def count_kills() -> int:
    """Return how many processes of this cgroup were killed, or 0 if it is unknown."""
    with suppress(OSError, ValueError):  # another system, or a file that this process may not read
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root, name = COUNTERS.get(controllers, ("", ""))
            # A container may see only its own group, at the root.
            for file in (Path(root + path, name), Path(root, name)):
                if root and file.exists():
                    return int(dict(each.split() for each in file.read_text().splitlines()).get("oom_kill", 0))
    return 0
