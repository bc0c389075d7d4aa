"""The lock of a checkpoint folder. Without it two runs in one folder would remove each other's checkpoints.

It is a POSIX record lock on the file `.lock` in the folder, whose text names the holder. The kernel releases the lock when
the process ends in any way. Forked loader workers do not inherit it, and it works over NFS. A file system without locks has
none. Object stores, which have no suitable atomic operation, have an object that its holder renews (`remote_lock.py`).

NOTE: a process that closes any descriptor of a file loses its POSIX locks on the file. So this process opens the file once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from trainwright.checkpoint.filesystem import Files, RemoteFiles, describe, resolve
from trainwright.checkpoint.remote_lock import (
    LOCK_NAME,
    RemoteLock,
    describe_holder,
    lock_remote_folder,
    parse_holder,
    refusal,
    this_holder,
)
from trainwright.errors import CheckpointError

ATTEMPTS = 20
NAMED_SECONDS = 0.5
"""How long a process waits for the holder to write its name."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# POSIX allows either for a lock that another process holds.
_IS_HELD = (errno.EACCES, errno.EAGAIN)


@dataclass
class _Holding:
    """A lock of this process."""

    path: str
    descriptor: int
    created: list[str]
    """The directories that were created for the lock, the innermost first."""
    pid: int = field(default_factory=os.getpid)
    count: int = 1


_held: dict[tuple[int, int], _Holding] = {}
"""The locks of this process, by the file's device and inode."""
_guard = threading.Lock()


class FolderLock:
    """This process's lock on a checkpoint folder, made by `lock_folder`.

    `key` is the lock file's device and inode, or None for a folder without a lock. `previous_holder` names a process that
    ended without releasing the lock.
    """

    def __init__(self, folder: str, key: tuple[int, int] | None, previous_holder: str = "") -> None:
        self.folder, self.previous_holder = folder, previous_holder
        self._key = key

    def release(self) -> None:
        """Release the folder, and remove the files of the lock. A second call does nothing."""
        key, self._key = self._key, None
        with _guard:
            holding = _held.get(key) if key is not None else None
            if key is None or holding is None or holding.pid != os.getpid():  # a forked child has no lock
                return
            holding.count -= 1
            if holding.count:
                return
            del _held[key]
            with contextlib.suppress(OSError):  # the folder may have been removed
                if _key(os.stat(holding.path)) == key:
                    # While the file is locked, so that another process notices that it is gone, and opens it again.
                    os.unlink(holding.path)
            os.close(holding.descriptor)
            with contextlib.suppress(OSError):  # not empty
                for directory in holding.created:
                    os.rmdir(directory)


def lock_folder(folder: str) -> FolderLock | RemoteLock:
    """Lock a folder for this process, and create it if it is missing. The same process may lock it several times.

    CheckpointError if another process has locked it, or if it cannot be written.
    """
    files, inside = resolve(folder)
    if isinstance(files, RemoteFiles):
        with _guard:
            return lock_remote_folder(files, inside, folder)
    path, missing = f"{inside}/{LOCK_NAME}", _missing(inside)
    with _guard:
        try:
            with contextlib.suppress(FileNotFoundError):
                key = _key(os.stat(path))
                if key in _held and _held[key].pid == os.getpid():
                    _held[key].count += 1
                    return FolderLock(folder, key)
            descriptor, previous = _acquire_in(files, inside, path, folder)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint folder {folder} cannot be written: {describe(error, path)}. Give ModelCheckpoint a "
                "dirpath in which files can be created."
            ) from error
        key = _key(os.fstat(descriptor))
        _held[key] = _Holding(path, descriptor, missing)
    return FolderLock(folder, key, previous)


def _acquire_in(files: Files, inside: str, path: str, folder: str) -> tuple[int, str]:
    """Lock a folder. If another process releases and removes the empty folder at the same moment, create it again."""
    for _ in range(ATTEMPTS - 1):
        files.make_directories(inside)
        with contextlib.suppress(FileNotFoundError):
            return _acquire(path, folder)
    return _acquire(path, folder)


def _acquire(path: str, folder: str) -> tuple[int, str]:
    """Return the descriptor of the locked file, and a previous holder that ended without releasing it. Never wait."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _IS_HELD:
                    raise refusal(folder, path, _read_soon(descriptor)) from None
                if error.errno not in _NO_LOCKS:
                    raise
            with contextlib.suppress(FileNotFoundError):
                if _key(os.stat(path)) == _key(os.fstat(descriptor)):  # otherwise the holder has just removed the file
                    previous = _read(descriptor)
                    _write(descriptor)
                    return descriptor, describe_holder(previous) if previous else ""
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _read(descriptor: int) -> dict[str, Any]:
    """Return the holder that the file names, or an empty dict."""
    return parse_holder(os.pread(descriptor, 4096, 0))


def _read_soon(descriptor: int) -> dict[str, Any]:
    """Return the holder of a locked file. It writes its name right after locking the file."""
    for _ in range(ATTEMPTS):
        if holder := _read(descriptor):
            return holder
        time.sleep(NAMED_SECONDS / ATTEMPTS)
    return {}


def _write(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(this_holder()).encode(), 0)


def _missing(directory: str) -> list[str]:
    """Return the missing directories of a path, the innermost first."""
    missing = []
    while directory and not os.path.isdir(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    return missing


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
