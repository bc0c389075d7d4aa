"""Files of loggers on a disk or another file system of fsspec: whole files and run folders."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from trainwright.faults.remote_calls import RemoteFilesystem
from trainwright.paths import is_process_alive, machine, process_start_time

__all__ = ["CHECKPOINTS", "TABLE_NAME", "write_file"]

CHECKPOINTS = "checkpoints"
"""The default checkpoint folder within a run's log folder."""
TABLE_NAME = "metrics.csv"
HPARAMS_NAME, HPARAMS_YAML = "hparams.json", "hparams.yaml"
"""The files of the hyper-parameters."""


def filesystem_of(path: str) -> tuple[Any, str]:
    """Return the file system of a path or URL, with limited calls if it is remote, and the path within it."""
    filesystem, inside = fsspec.core.url_to_fs(path)
    return filesystem if isinstance(filesystem, LocalFileSystem) else RemoteFilesystem(filesystem), inside


def is_local(path: str) -> bool:
    return isinstance(fsspec.core.url_to_fs(path)[0], LocalFileSystem)


def write_file(path: str, data: bytes) -> None:
    """Write a whole file. On a local disk this is atomic and durable, and removes leftovers of killed writers."""
    filesystem, inside = filesystem_of(path)
    if not isinstance(filesystem, LocalFileSystem):
        filesystem.pipe_file(inside, data)
        return
    os.makedirs(os.path.dirname(inside), exist_ok=True)  # the sub_dir of a TensorBoardLogger begins with this file
    _sweep(inside)
    pid = os.getpid()
    temporary = f"{inside}.{machine()}-{pid}-{process_start_time(pid)}-{threading.get_ident()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # a link, perhaps
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, inside)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _sweep(path: str) -> None:
    """Remove temporary files of a file whose processes on this machine were killed."""
    folder, name = os.path.split(path)
    temporary = re.compile(rf"{re.escape(name)}\.{machine()}-(\d+)-(\d+)-\d+\.tmp", re.ASCII)
    with contextlib.suppress(OSError):  # a problem of the folder also fails the write
        for other in os.listdir(folder):
            match = temporary.fullmatch(other)
            if match is not None and not is_process_alive(int(match[1]), match[2]):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{folder}/{other}")


def claim_folder(root: str, version: int | str | None) -> str:
    """Create the folder of a run and return its path. The default version is the next free number."""
    filesystem, inside = filesystem_of(root)
    with _explained_for(root):
        filesystem.makedirs(inside, exist_ok=True)
        if version is not None:
            folder = f"version_{version}" if isinstance(version, int) else version
            filesystem.makedirs(f"{inside}/{folder}", exist_ok=True)
            return f"{root}/{folder}"
        number = next_number(filesystem, inside)
        while True:
            path = f"{inside}/version_{number}"
            try:
                filesystem.mkdir(path, create_parents=False)  # only one of several processes succeeds
            except FileExistsError:
                number += 1
                continue
            except FileNotFoundError:  # a rejected run has removed the root
                filesystem.makedirs(inside, exist_ok=True)
                continue
            if not filesystem.exists(path):  # an object store has no empty folders
                filesystem.pipe_file(f"{path}/{HPARAMS_NAME}", b"{}\n")
            return f"{root}/version_{number}"


def run_numbers(filesystem: Any, inside: str) -> list[int]:
    filesystem.invalidate_cache()
    try:
        names = [name.rstrip("/").rpartition("/")[2] for name in filesystem.ls(inside, detail=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(match[1]) for name in names if (match := re.fullmatch(r"version_(\d+)", name))]


def next_number(filesystem: Any, inside: str) -> int:
    return 1 + max(run_numbers(filesystem, inside), default=-1)


@contextlib.contextmanager
def _explained_for(root: str) -> Iterator[None]:
    """Turn an OSError of the block, which makes a run's folder, into one that names the argument to change."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"the run cannot write to {root} ({error.strerror or error}). Set another default_root_dir, or another save_dir of "
            "the logger."
        ) from error


class Flushed(Protocol):
    """A logger, for functions that only flush it."""

    def flush(self) -> None:
        """Write the buffered data."""


def flush_at_exit(logger: Flushed, *, keep: bool = False) -> None:
    """Flush a logger at the end of the process if it still exists. `keep` keeps it alive."""
    find: Callable[[], Flushed | None] = (lambda: logger) if keep else weakref.ref(logger)
    process = os.getpid()

    def flush() -> None:
        if os.getpid() == process and (alive := find()) is not None:
            alive.flush()

    atexit.register(flush)
