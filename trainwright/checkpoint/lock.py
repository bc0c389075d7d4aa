"""The lock of a folder of checkpoints: two runs that wrote into one would remove each other's.

It is a POSIX record lock on the file `.lock` in the folder, whose text says who holds it. The kernel drops it when the
process ends, however that ends; forked loader workers do not have it, and it holds over NFS. Where a file system knows no
locks, the file's existence is the lock, and the process that it names is looked for. A remote place (any fsspec URL that is
no local path) has no lock: nothing there is atomic enough to build one on.

NOTE: a process that closes any descriptor of a file loses its POSIX locks on it, so this process opens the file once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from trainwright.checkpoint.filesystem import Files, describe, resolve
from trainwright.checkpoint.temporary import is_process_alive, machine, process_start_time
from trainwright.errors import CheckpointError
from trainwright.paths import open_no_link

LOCK_NAME = ".lock"
ATTEMPTS = 20
CLAIM_SECONDS = 0.2
"""How long a claim has to stand where the file system knows no locks: longer than another process takes from look to claim."""
NAMED_SECONDS = 0.5
"""How long whoever is refused waits for the holder to write its name."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_IS_HELD = (errno.EACCES, errno.EAGAIN)


@dataclass
class _Holding:
    """What this process holds."""

    path: str
    descriptor: int
    pid: int = field(default_factory=os.getpid)
    count: int = 1
    made: list[str] = field(default_factory=list)
    """The directories that were made for it, the innermost first."""


_held: dict[tuple[int, int], _Holding] = {}
"""By the file's device and inode."""
_guard = threading.Lock()


class FolderLock:
    """Holds a folder of checkpoints for this process; made by `lock_folder`.

    Args:
        folder: the folder.
        previous_holder: who held it before and has ended without giving it back; empty where nobody has.
    """

    def __init__(self, folder: str, key: tuple[int, int] | None, previous_holder: str = "") -> None:
        self.folder, self.previous_holder = folder, previous_holder
        self._key = key

    def release(self) -> None:
        """Give the folder back, and remove what was made for the lock; a second call does nothing."""
        key, self._key = self._key, None
        with _guard:
            holding = _held.get(key) if key is not None else None
            if key is None or holding is None or holding.pid != os.getpid():  # a forked child holds nothing
                return
            holding.count -= 1
            if holding.count:
                return
            del _held[key]
            with contextlib.suppress(OSError):  # the folder may have been removed
                if _key(os.stat(holding.path)) == key:
                    os.unlink(holding.path)  # before the lock goes: who waits finds another file, and looks again
            os.close(holding.descriptor)
            with contextlib.suppress(OSError):  # there is something in it
                for directory in holding.made:
                    os.rmdir(directory)


def lock_folder(folder: str) -> FolderLock:
    """Hold a folder for this process, made where it is missing. The same process may hold it several times.

    Raises:
        CheckpointError: another process holds it, or nothing can be written there.
    """
    files, inside = resolve(folder)
    if not files.has_rename:
        return FolderLock(folder, None)
    path, made = f"{inside}/{LOCK_NAME}", _missing(inside)
    with _guard:
        try:
            with contextlib.suppress(FileNotFoundError):
                key = _key(os.stat(path))
                if key in _held and _held[key].pid == os.getpid():
                    _held[key].count += 1
                    return FolderLock(folder, key)
            descriptor, earlier = _acquire_in(files, inside, path, folder)
        except OSError as error:
            raise CheckpointError(
                f"the folder of checkpoints {folder} cannot be written: {describe(error, path)}. Give ModelCheckpoint a "
                "dirpath in which files can be made."
            ) from error
        key = _key(os.fstat(descriptor))
        _held[key] = _Holding(path, descriptor, made=made)
    return FolderLock(folder, key, earlier)


def _acquire_in(files: Files, inside: str, path: str, folder: str) -> tuple[int, str]:
    """Lock a folder that another process may remove, empty as it is, in the same moment."""
    for _ in range(ATTEMPTS - 1):
        files.make_directories(inside)
        with contextlib.suppress(FileNotFoundError):
            return _acquire(path, folder)
    return _acquire(path, folder)


def _acquire(path: str, folder: str) -> tuple[int, str]:
    """Return the descriptor of the file that is locked now, and who held it and has ended; waits for nobody."""
    while True:
        descriptor = open_no_link(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _IS_HELD:
                    raise _refusal(folder, path, _read_soon(descriptor)) from None
                if error.errno not in _NO_LOCKS:
                    raise
                return _acquire_by_name(path, folder, descriptor)
            with contextlib.suppress(FileNotFoundError):
                if _key(os.stat(path)) == _key(os.fstat(descriptor)):  # else its holder has just removed it
                    earlier = _read(descriptor)
                    _write(descriptor)
                    return descriptor, _describe(earlier) if earlier else ""
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _acquire_by_name(path: str, folder: str, descriptor: int) -> tuple[int, str]:
    """Take the lock where there are no locks: put a file of one's own in its place, and see whether it stays there."""
    holder = _read(descriptor)
    if holder and (holder.get("machine") != machine() or is_process_alive(int(holder["pid"]), str(holder["start"]))):
        raise _refusal(folder, path, holder)
    own = f"{path}-{uuid.uuid4().hex[:12]}"
    mine = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write(mine)
        os.rename(own, path)
        time.sleep(CLAIM_SECONDS)  # of several that found nobody, the last one has it
        if _key(os.stat(path)) != _key(os.fstat(mine)):
            raise _refusal(folder, path, {})
    except BaseException:
        os.close(mine)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(own)
        raise
    os.close(descriptor)
    return mine, _describe(holder) if holder else ""


def _refusal(folder: str, path: str, holder: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"the folder of checkpoints {folder} is in use by another run: {_describe(holder)}. Wait for its end or stop it, or "
        f"give ModelCheckpoint another dirpath. (If you are sure that no such process is left, remove {path}.)"
    )


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "one that has just begun"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


def _read(descriptor: int) -> dict[str, Any]:
    """Return who the file names; nothing where it names nobody."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) and {"pid", "start"} <= holder.keys() else {}


def _read_soon(descriptor: int) -> dict[str, Any]:
    """Return who a file that is locked names, which its holder writes right after."""
    for _ in range(ATTEMPTS):
        if holder := _read(descriptor):
            return holder
        time.sleep(NAMED_SECONDS / ATTEMPTS)
    return {}


def _write(descriptor: int) -> None:
    pid = os.getpid()
    holder = {
        "host": socket.gethostname(),
        "pid": pid,
        "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "machine": machine(),
        "start": process_start_time(pid),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _missing(directory: str) -> list[str]:
    """Return the directories that are not there yet, the innermost first."""
    missing = []
    while directory and not os.path.isdir(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    return missing


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
