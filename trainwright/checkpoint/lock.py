"""The lock of a checkpoint folder. Without it two runs in one folder would remove each other's checkpoints.

On a disk it is a POSIX record lock on the file `.lock` in the folder, whose text names the holder. The kernel releases the lock
when the process ends in any way. Forked loader workers do not inherit it, and it works over NFS. A file system without locks
has none.

In an object store `.lock` only names the holder. If the holder is a live process of this machine, the folder is in use. Of a
holder on another machine nothing is known, so it gets a warning, and its files stay.

NOTE: a process that closes any descriptor of a file loses its POSIX locks on the file. So this process opens the file once.
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
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from trainwright.checkpoint.filesystem import LocalFiles, RemoteFiles, describe, resolve, sweep_temporaries
from trainwright.errors import CheckpointError
from trainwright.paths import is_process_alive, machine, process_start_time
from trainwright.rank_zero import warn

LOCK_NAME = ".lock"
ATTEMPTS = 20
NAMED_SECONDS = 0.5
"""How long a process waits for the holder to write its name."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# POSIX allows either for a lock that another process holds.
_IS_HELD = (errno.EACCES, errno.EAGAIN)


@dataclass
class _Holding:
    """A lock of this process, and the function that removes its files."""

    remove: Callable[[], None]
    pid: int = field(default_factory=os.getpid)
    count: int = 1


_held: dict[Hashable, _Holding] = {}
"""The locks of this process, by the file's device and inode, or by the URL of a remote folder."""
_guard = threading.Lock()


class FolderLock:
    """This process's lock on a checkpoint folder, made by `lock_folder`."""

    def __init__(self, key: Hashable) -> None:
        self._key: Hashable | None = key

    def release(self) -> None:
        """Release the folder, and remove the files of the lock. A second call does nothing."""
        key, self._key = self._key, None
        with _guard:
            holding = _held.get(key) if key is not None else None
            if holding is None or holding.pid != os.getpid():  # a forked child has no lock
                return
            holding.count -= 1
            if not holding.count:
                del _held[key]
                holding.remove()


def lock_folder(folder: str) -> FolderLock:
    """Lock a folder for this process, create it if it is missing, and remove files that killed runs left in it.

    The same process may lock it several times.

    CheckpointError if another process has locked it, or if it cannot be written.
    """
    files, inside = resolve(folder)
    path, is_alone = f"{inside}/{LOCK_NAME}", True
    with _guard:
        try:
            with contextlib.suppress(FileNotFoundError):
                key: Hashable = files.address(path) if isinstance(files, RemoteFiles) else _key(os.stat(path))
                if key in _held and _held[key].pid == os.getpid():
                    _held[key].count += 1
                    return FolderLock(key)
            if isinstance(files, RemoteFiles):
                is_alone, remove = _name_holder(files, path, folder), partial(_remove_remote, files, path)
            else:
                missing = [
                    str(directory) for directory in (Path(inside), *Path(inside).parents) if not directory.is_dir()
                ]
                descriptor = _acquire(files, inside, path, folder)
                key, remove = _key(os.fstat(descriptor)), partial(_remove, path, descriptor, missing)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint folder {folder} cannot be written: {describe(error, path)}. Give ModelCheckpoint a "
                "dirpath in which files can be created."
            ) from error
        _held[key] = _Holding(remove)
    if is_alone:
        sweep_temporaries(folder)
    return FolderLock(key)


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _acquire(files: LocalFiles, inside: str, path: str, folder: str) -> int:
    """Return the descriptor of the locked file. Never wait, but try again if the holder has just removed it or the folder."""
    for _ in range(ATTEMPTS):
        files.make_directories(inside)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as closing:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
            closing.callback(os.close, descriptor)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _IS_HELD:
                    raise _in_use(folder, path, _read_soon(descriptor)) from None
                if error.errno not in _NO_LOCKS:
                    raise
            if _key(os.stat(path)) == _key(os.fstat(descriptor)):
                _write(descriptor)
                closing.pop_all()
                return descriptor
    raise FileNotFoundError(errno.ENOENT, "other processes remove it again and again", path)


def _remove(path: str, descriptor: int, created: list[str]) -> None:
    """Remove a lock's file, and the directories that were created for it (the innermost first) if they are empty."""
    with contextlib.suppress(OSError):  # the folder may have been removed
        if _key(os.stat(path)) == _key(os.fstat(descriptor)):
            # While the file is locked, so that another process notices that it is gone, and opens it again.
            os.unlink(path)
    os.close(descriptor)
    with contextlib.suppress(OSError):  # not empty
        for directory in created:
            os.rmdir(directory)


def _name_holder(files: RemoteFiles, path: str, folder: str) -> bool:
    """Name this process in a remote folder, and return whether no run on another machine may be alive."""
    holder: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError), files.open(path) as stream:
        holder = _parsed(stream.read(4096))
    is_foreign = bool(holder) and holder.get("machine") != machine()
    if is_foreign:
        warn(
            f"{folder} has not been released by {_describe(holder)}. If that run still trains, stop one of the two, because "
            "they would remove each other's checkpoints.",
            stacklevel=2,
        )
    elif holder and is_process_alive(holder["pid"], str(holder["start"])):
        raise _in_use(folder, files.address(path), holder)
    files.put(path, _this_holder())
    return not is_foreign


def _remove_remote(files: RemoteFiles, path: str) -> None:
    with contextlib.suppress(Exception):  # an outage: the next run on this machine sees that this process has ended
        files.remove_file(path)


def _in_use(folder: str, path: str, holder: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint folder {folder} is in use by another run: {_describe(holder)}. Wait until it ends, stop it, or pass "
        f"ModelCheckpoint another dirpath. (If you are sure that this process no longer runs, remove {path}.)"
    )


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "a run that has just started"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


def _this_holder() -> bytes:
    pid, since = os.getpid(), f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    holder = {"host": socket.gethostname(), "pid": pid, "since": since, "machine": machine()}
    return json.dumps({**holder, "start": process_start_time(pid)}).encode()


def _write(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, _this_holder(), 0)


def _read_soon(descriptor: int) -> dict[str, Any]:
    """Return the holder of a locked file. It writes its name right after locking the file."""
    for _ in range(ATTEMPTS):
        if holder := _parsed(os.pread(descriptor, 4096, 0)):
            return holder
        time.sleep(NAMED_SECONDS / ATTEMPTS)
    return {}


def _parsed(data: bytes) -> dict[str, Any]:
    """Return the holder that the file names, or an empty dict."""
    try:
        holder = json.loads(data)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) and type(holder.get("pid")) is int and "start" in holder else {}
