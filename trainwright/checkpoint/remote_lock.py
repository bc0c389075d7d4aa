"""The lock of a checkpoint folder in an object store: an object that names its holder, and that a thread renews.

A store has no lock that ends with its process. Another run takes the folder over if the holder's process on this machine has
ended, or if the object is not renewed for STALE_SECONDS. That needs no clock that the machines share.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
import warnings
from datetime import UTC, datetime
from typing import Any

from trainwright.checkpoint.filesystem import RemoteFiles, describe
from trainwright.errors import CheckpointError
from trainwright.paths import is_process_alive, machine, process_start_time

LOCK_NAME = ".lock"
RENEWAL_SECONDS, STALE_SECONDS = 20.0, 90.0
CONFIRMATION_SECONDS = 0.2
"""After its write a run waits this long, and then sees whether another run has written at the same moment."""
_held: dict[str, RemoteLock] = {}


class RemoteLock:
    """This process's lock on a remote folder, with the attributes of a FolderLock."""

    def __init__(self, files: RemoteFiles, path: str, folder: str, previous_holder: str) -> None:
        self.folder, self.previous_holder = folder, previous_holder
        self._files, self._path = files, path
        self._holder = {**this_holder(), "id": uuid.uuid4().hex, "renewal": 0}
        self._count, self._released = 0, threading.Event()
        self._thread = threading.Thread(target=self._renew, name="trainwright-lock", daemon=True)

    def take(self) -> None:
        self._write()
        time.sleep(CONFIRMATION_SECONDS)
        if (holder := _read(self._files, self._path)).get("id") != self._holder["id"]:
            raise refusal(self.folder, self._path, holder)
        self._thread.start()

    @property
    def is_ours(self) -> bool:
        """Return whether this process holds the lock. A forked child does not."""
        return not self._released.is_set() and self._holder["pid"] == os.getpid()

    def hold(self) -> RemoteLock:
        self._count += 1
        return self

    def release(self) -> None:
        """Release the folder after as many calls as `lock_folder` has had."""
        self._count -= 1
        if self._count or self._released.is_set() or not self.is_ours:
            return
        self._released.set()
        self._thread.join()
        with contextlib.suppress(Exception):  # another run takes it over without this
            if _read(self._files, self._path).get("id") == self._holder["id"]:
                self._files.remove_file(self._path)

    def _write(self) -> None:
        self._files.put(self._path, json.dumps(self._holder).encode())

    def _renew(self) -> None:
        while not self._released.wait(RENEWAL_SECONDS):
            with contextlib.suppress(Exception):  # an outage: tried again
                if (holder := _read(self._files, self._path)).get("id", "") not in ("", self._holder["id"]):
                    warnings.warn(f"{refusal(self.folder, self._path, holder)}", stacklevel=2)
                    return
                self._holder["renewal"] += 1
                self._write()


def lock_remote_folder(files: RemoteFiles, inside: str, folder: str) -> RemoteLock:
    """Lock a remote folder for this process. CheckpointError if another run has locked it, or if it cannot be written."""
    path, key = f"{inside}/{LOCK_NAME}", f"{files.protocol}:{inside}"
    if key in _held and _held[key].is_ours:
        return _held[key].hold()
    try:
        holder = _read(files, path)
        if holder and not _has_ended(files, path, holder):
            raise refusal(folder, path, holder)
        lock = RemoteLock(files, path, folder, describe_holder(holder) if holder else "")
        lock.take()
    except CheckpointError:
        raise
    except Exception as error:  # clients raise errors of any type
        raise CheckpointError(
            f"the checkpoint folder {folder} cannot be written: {describe(error, path)}. Give ModelCheckpoint a dirpath in "
            "which files can be created."
        ) from error
    _held[key] = lock
    return lock.hold()


def _has_ended(files: RemoteFiles, path: str, holder: dict[str, Any]) -> bool:
    """Return whether the holder's process on this machine has ended, or the lock is not renewed."""
    if holder.get("machine") == machine():
        return not is_process_alive(holder["pid"], str(holder["start"]))
    print(
        f"trainwright: waiting up to {STALE_SECONDS:g} s to see whether {describe_holder(holder)} is alive",
        file=sys.stderr,
    )
    end = time.monotonic() + STALE_SECONDS
    while time.monotonic() < end:
        time.sleep(min(1.0, RENEWAL_SECONDS))
        if (now := _read(files, path)) != holder:
            return not now
    return True


def _read(files: RemoteFiles, path: str) -> dict[str, Any]:
    try:
        with files.open(path) as stream:
            return parse_holder(stream.read(4096))
    except FileNotFoundError:
        return {}


# -- the holder, also of a local lock ------------------------------------------------------------------------------------


def this_holder() -> dict[str, Any]:
    """Return the description of this process in a lock."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "machine": machine(),
        "start": process_start_time(pid),
    }


def parse_holder(data: bytes) -> dict[str, Any]:
    """Return the holder that a lock names, or an empty dict."""
    try:
        holder = json.loads(data)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) and type(holder.get("pid")) is int and "start" in holder else {}


def describe_holder(holder: dict[str, Any]) -> str:
    if not holder:
        return "a run that has just started"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


def refusal(folder: str, path: str, holder: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint folder {folder} is in use by another run: {describe_holder(holder)}. Wait until it ends, stop it, or "
        f"pass ModelCheckpoint another dirpath. (If you are sure that this process no longer runs, remove {path}.)"
    )
