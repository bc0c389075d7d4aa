"""The file systems of checkpoints: a local file system, with fsync and rename, or any other file system of fsspec.

A local checkpoint is written under a temporary name, which records the writing process, and then renamed. Other file systems
may have no atomic rename. There the files get their final names, and the manifest, written last and in one piece, is the
commit.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast

import fsspec.core

from trainwright.distributed.environment import rung_file
from trainwright.errors import CheckpointError
from trainwright.faults.remote_calls import RemoteFilesystem, repeated
from trainwright.paths import is_process_alive, machine, process_start_time

__all__ = ["NEW_PATHS", "resolve"]

Result = TypeVar("Result")
DRAINED_BYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2
NEW_PATHS = "new_paths.txt"
"""The file in a rung's folder that lists the paths that its script has created."""
OUR_FILE, COMMIT = re.compile(r"(?:[a-z][a-z0-9_]*-\d{5}\.safetensors|rank-\d{5}\.json)", re.ASCII), "manifest.json"
"""The names of files that only a checkpoint has, and the name of the file that is written last."""
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
# .<name>.tmp-<machine>-<pid>-<start of the process>-<unique>, so that one mkdir also records the writer.
_TEMPORARY = re.compile(r"\..+\.tmp-([0-9a-f]{8})-(\d+)-(\d+)-[0-9a-f]{12}", re.ASCII | re.DOTALL)
FOREIGN_SECONDS = 86400.0
"""How long another machine's temporary directory stays after its last new file, since its writer may still be alive."""


# It starts to write a file's dirty pages to disk without waiting.
_drain = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
if _drain is not None:
    _drain.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_CURRENT_DIRECTORY, _RENAME_EXCHANGE = -100, 2  # of linux/fs.h
_exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None


class _Draining:
    """A file whose data goes to disk while it is written, so that the final sync is short."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._waiting = 0

    def write(self, data: bytes | memoryview) -> int:
        left = memoryview(data)
        while left:
            # An unbuffered file may accept only a part of the data.
            count = self._stream.write(left[:DRAINED_BYTES])
            left = left[count:]
            self._waiting += count
            # Otherwise the data stays in the kernel's memory, and the disk is idle during hashing and copying.
            if self._waiting >= DRAINED_BYTES and _drain is not None:
                self._waiting = 0
                _drain(self._stream.fileno(), 0, 0, _SYNC_FILE_RANGE_WRITE)  # the final sync reports errors
        return len(data)


class LocalFiles:
    """A local file system, through `os`. Paths come from `resolve` and are joined by `/`."""

    has_rename = True

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def listing(self, path: str) -> dict[str, int | None]:
        """Return the names in a directory with the sizes of plain files, and None for anything else."""
        sizes: dict[str, int | None] = {}
        with os.scandir(path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    status = entry.stat(follow_symlinks=False)
                    sizes[entry.name] = status.st_size if stat.S_ISREG(status.st_mode) else None
        return sizes

    def tree(self, path: str) -> dict[str, int | None]:
        """Return all files below a directory by their relative paths, with their sizes or None as in `listing`."""
        sizes: dict[str, int | None] = {}
        for folder, folders, names in os.walk(path):
            for name in (*names, *(link for link in folders if os.path.islink(f"{folder}/{link}"))):
                status = os.lstat(f"{folder}/{name}")
                relative = os.path.relpath(f"{folder}/{name}", path)
                sizes[relative] = status.st_size if stat.S_ISREG(status.st_mode) else None
        return sizes

    def sync_tree(self, path: str, names: Iterable[str]) -> None:
        """Make files that others wrote into a directory durable, and their folders."""
        for name in names:
            for part in (name, *(str(parent) for parent in PurePosixPath(name).parents)):
                self.sync_directory(f"{path}/{part}")

    def make_directories(self, path: str) -> None:
        """Create a directory and its missing parents, durably."""
        if path and not os.path.isdir(path):
            parent = os.path.dirname(path)
            self.make_directories(parent)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            self.sync_directory(parent)

    def make_new_directory(self, path: str) -> None:
        """Create a directory, which must not exist yet, in an existing directory."""
        os.mkdir(path)

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """Open a new file, whose `write` writes all of the data. At the end of the context it is synced and closed."""
        with open(path, "xb", buffering=0) as stream:
            yield cast(BinaryIO, _Draining(cast(BinaryIO, stream)))
            os.fsync(stream.fileno())

    def write(self, path: str, write: Callable[[BinaryIO], Result]) -> Result:
        """Create a file with the content that `write` writes, which may be called again, and return its result."""
        return _write_once(self, path, write)

    def put(self, path: str, data: bytes) -> None:
        """Write a small file durably, atomically if the file system can."""
        with self.create(path) as stream:
            stream.write(data)

    def open(self, path: str) -> BinaryIO:
        return cast(BinaryIO, open(path, "rb", buffering=0, opener=_open_plain))

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:  # some network file systems cannot sync a directory
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        """Rename a directory or file. The caller has checked that the target is free."""
        os.rename(source, target)

    def exchange(self, left: str, right: str) -> bool:
        """Exchange the names of two directories in one step. Return False if the system or the file system cannot."""
        names = os.fsencode(left), os.fsencode(right)
        if _exchange is None:
            return False
        if not _exchange(_CURRENT_DIRECTORY, names[0], _CURRENT_DIRECTORY, names[1], _RENAME_EXCHANGE):
            return True
        code = ctypes.get_errno()
        if code in (*_UNSUPPORTED, errno.ENOSYS):
            return False
        raise OSError(code, os.strerror(code), left, None, right)

    def link(self, source: str, target: str) -> None:
        """Add a second name for a file or a symbolic link, and create the name's folders."""
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.link(source, target, follow_symlinks=False)

    def remove_file(self, path: str) -> None:
        os.unlink(path)

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path)

    def remove_empty(self, path: str) -> None:
        """Remove a directory if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _open_plain(path: str, flags: int) -> int:
    """Open a plain file. A link is rejected, and so is a pipe, whose open would wait for a writer."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a plain file", path)
    return descriptor


class RemoteFiles:
    """Any other fsspec file system (an object store, memory), used like LocalFiles. A file exists after it is closed."""

    has_rename = False

    def __init__(self, filesystem: Any) -> None:
        self._fs = RemoteFilesystem(filesystem)

    def address(self, path: str) -> str:
        return str(self._fs.unstrip_protocol(path))

    def exists(self, path: str) -> bool:
        # Otherwise fsspec may return a listing from before another process's write.
        self._fs.invalidate_cache()
        return self._fs.exists(path)

    def listing(self, path: str) -> dict[str, int | None]:
        self._fs.invalidate_cache()
        sizes: dict[str, int | None] = {}
        for item in self._fs.ls(path, detail=True):
            name = item["name"].rstrip("/").rsplit("/", 1)[-1]
            sizes[name] = int(item["size"]) if item["type"] == "file" and not item.get("islink") else None
        return sizes

    def tree(self, path: str) -> dict[str, int | None]:
        self._fs.invalidate_cache()
        items = self._fs.find(path, detail=True).items()
        return {name[len(path) :].lstrip("/"): int(item["size"]) for name, item in items}

    def sync_tree(self, path: str, names: Iterable[str]) -> None:
        pass

    def make_directories(self, path: str) -> None:
        self._fs.makedirs(path, exist_ok=True)

    def make_new_directory(self, path: str) -> None:
        self._fs.makedirs(path, exist_ok=False)

    def create(self, path: str) -> contextlib.AbstractContextManager[BinaryIO]:
        return cast(contextlib.AbstractContextManager[BinaryIO], self._fs.open(path, "wb"))

    def write(self, path: str, write: Callable[[BinaryIO], Result]) -> Result:
        return cast(Result, repeated(partial(_write_once, self, path, write), "the upload", self.address(path)))

    def put(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(path, data)

    def open(self, path: str) -> BinaryIO:
        return cast(BinaryIO, self._fs.open(path, "rb"))

    def sync_directory(self, path: str) -> None:
        pass

    def rename(self, source: str, target: str) -> Any:
        raise NotImplementedError("an object store has no rename of a directory")

    exchange = link = rename

    def remove_file(self, path: str) -> None:
        self._fs.rm_file(path)

    def remove_tree(self, path: str) -> None:
        self._fs.rm(path, recursive=True)

    def remove_empty(self, path: str) -> None:
        with contextlib.suppress(OSError, NotImplementedError):
            self._fs.rmdir(path)

    def sweep_uploads(self, folder: str) -> list[str]:
        """Remove checkpoints without a manifest, and unfinished multipart uploads, directly in a folder that this run has."""
        swept = []
        with contextlib.suppress(FileNotFoundError):
            for name in [name for name, size in sorted(self.listing(folder).items()) if size is None]:
                names = self.tree(f"{folder}/{name}").keys()
                if COMMIT not in names and any(OUR_FILE.fullmatch(other) for other in names):
                    self.remove_tree(f"{folder}/{name}")
                    swept.append(name)
        bucket, _, prefix = folder.partition("/")
        with contextlib.suppress(Exception):  # only s3fs has these calls, and they need a permission
            for upload in self._fs.list_multipart_uploads(bucket):
                name = upload["Key"].removeprefix(f"{prefix}/").partition("/")[2]
                if upload["Key"].startswith(f"{prefix}/") and (name == COMMIT or OUR_FILE.fullmatch(name)):
                    self._fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])
        return swept


Files = LocalFiles | RemoteFiles


def _write_once(files: Files, path: str, write: Callable[[BinaryIO], Result]) -> Result:
    with files.create(path) as stream:
        return write(stream)


def resolve(path: str) -> tuple[Files, str]:
    """Return the file system of a path or URL, and the path within it."""
    filesystem, inside = fsspec.core.url_to_fs(os.fspath(path))
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
    inside = str(inside).rstrip("/") or "/"
    return (LocalFiles() if protocols & {"file", "local"} else RemoteFiles(filesystem)), inside


def digest_of(files: Files, path: str) -> str:
    """Return the SHA-256 of a file."""
    with files.open(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def describe(error: BaseException, path: str) -> str:
    """Return a description of a failed write and, if the cause is known, a remedy."""
    if isinstance(error, CheckpointError):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not isinstance(error, OSError):
        return text
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full ({text}{_free(path)}). Free space there or write checkpoints to another directory"
    if error.errno == errno.EFBIG:
        return (
            f"a file may not become that large ({text}{_free(path)}). Raise this process's limit (ulimit -f) or write "
            "checkpoints to a file system that allows larger files"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"the directory cannot be written ({text}). Choose a directory that this user may write to, or change its "
            "permissions"
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"the directory cannot be made ({text}). Choose a path without a file as one of its parts"
    return text


def _free(path: str) -> str:
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(os.path.dirname(path)).free
        return f"; {free >> 20} MiB ({free} bytes) are free"
    return ""


def temporary_path(path: str) -> str:
    """Return an unused name in the directory of a path, which records the process."""
    parent, name = os.path.split(path)
    pid = os.getpid()
    # Searches for checkpoints skip names with a leading dot.
    return f"{parent}/.{name}.tmp-{machine()}-{pid}-{process_start_time(pid)}-{uuid.uuid4().hex[:12]}"


def note_new(path: str) -> None:
    """List a local path that will be created, so that a ladder moves it away before it runs the script again."""
    rung = rung_file()
    if rung is not None and not os.path.lexists(path):
        with open(os.path.join(os.path.dirname(rung), NEW_PATHS), "a", encoding="utf-8") as lines:
            lines.write(f"{os.path.abspath(path)}\n")


def sweep_temporaries(directory: str) -> list[str]:
    """Remove the temporary directories, or half uploads, of dead writers, and return their names. The folder is locked."""
    files, inside = resolve(directory)
    if isinstance(files, RemoteFiles):
        return files.sweep_uploads(inside)
    if not os.path.isdir(inside):
        return []
    swept = []
    for name, size in sorted(files.listing(inside).items()):
        match = _TEMPORARY.fullmatch(name)
        path = f"{inside}/{name}"
        if match is None or size is not None or os.path.islink(path):
            continue
        with contextlib.suppress(OSError):  # no reason to end a run
            if match[1] == machine():
                is_dead = not is_process_alive(int(match[2]), match[3])
            else:
                is_dead = time.time() - os.stat(path).st_mtime > FOREIGN_SECONDS
            if is_dead:
                files.remove_tree(path)
                swept.append(name)
    return swept
