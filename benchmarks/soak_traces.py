"""What a killed job leaves behind: processes, listening ports, shared memory, temporary files. Linux only."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

TAG = "SOAK_TAG"
GONE_SECONDS = 20.0  # four times the goal of 5 s
SHARED = ("torch_", "psm_", "mp-", "gloo", "nccl", "deepspeed", "ds_")
"""How shared memory begins that torch, python, gloo, NCCL and DeepSpeed make; other programs have theirs there too.

Not python's semaphores (sem.mp-...): it makes and unlinks one in two system calls, one after the other, and a SIGKILL between
them leaves 32 bytes that tell nobody whose they were.
"""
LISTENS = "0A"
"""A listening socket's state in /proc/net/tcp."""


class Traces:
    """The traces of one job, whose processes have a tag in their environment and a separate temporary folder."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.temporary = Path(tempfile.mkdtemp(prefix="soak-"))  # a short path: sockets are bound in it
        atexit.register(shutil.rmtree, self.temporary, ignore_errors=True)
        self.variables = {TAG: tag, "TMPDIR": str(self.temporary)}
        self._shared_before = set(os.listdir("/dev/shm"))
        self._ports: set[str] = set()

    def note_ports(self) -> None:
        """Record the ports that the job listens on now."""
        own = {inode for pid in processes_of(self.tag) for inode in _sockets(pid)}
        self._ports |= own & _listening()

    def left(self) -> tuple[float, list[str]]:
        """Wait until nothing is left of the job; return how many seconds that took, and what remained."""
        began = time.monotonic()
        while (left := self._left()) and time.monotonic() - began < GONE_SECONDS:
            time.sleep(0.1)
        shutil.rmtree(self.temporary, ignore_errors=True)
        seconds = time.monotonic() - began
        return seconds, [f"{each}, {seconds:.0f} s after the end of {self.tag}" for each in left]

    def _left(self) -> list[str]:
        left = [f"process {pid} ({_command(pid)})" for pid in processes_of(self.tag)]
        left += [f"a listening port (socket {inode})" for inode in self._ports & _listening()]
        for name in sorted(set(os.listdir("/dev/shm")) - self._shared_before):
            owner = re.match(r"torch_(\d+)_", name)
            if name.startswith(SHARED) and (
                owner is None or not os.path.exists(f"/proc/{owner[1]}")
            ):  # else another job's
                left.append(f"/dev/shm/{name}")
        names = sorted(path.name for path in self.temporary.iterdir())
        return left + [f"the temporary {each}" for each in names if not each.startswith("torchinductor")]  # a cache


def processes_of(tag: str, *, begins: bool = False) -> list[int]:
    """Return the living processes, without zombies, whose tag begins with this one."""
    found, mark = [], f"{TAG}={tag}".encode() + (b"" if begins else b"\0")
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if b"\0" + mark in b"\0" + Path("/proc", name, "environ").read_bytes():
                    found.append(int(name))
    return found


def lives(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[-80:].strip()
    return "gone by now"


def _sockets(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                socket = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
                found |= {socket[1]} if socket else set()
    return found


def _listening() -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(table) as file:
            rows = [line.split() for line in file][1:]
            found |= {row[9] for row in rows if row[3] == LISTENS}
    return found
