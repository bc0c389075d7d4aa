"""Whole files of loggers, on a local disk or any other file system of fsspec, and values as data for them."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator

import fsspec
from fsspec.implementations.local import LocalFileSystem

from trainwright.paths import is_process_alive, machine, process_start_time

__all__ = ["write_file"]


def is_local(path: str) -> bool:
    return isinstance(fsspec.core.url_to_fs(path)[0], LocalFileSystem)


@contextlib.contextmanager
def explained_for(root: str) -> Iterator[None]:
    """Let an error of the block, which makes a run's folder, say what to set instead (OSError)."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"the run cannot write to {root} ({error.strerror or error}); set another default_root_dir, or another save_dir of "
            "the logger."
        ) from error


def write_file(path: str, data: bytes) -> None:
    """Write a whole file; on a local disk atomically and durably, and without what killed writers of it have left."""
    filesystem, inside = fsspec.core.url_to_fs(path)
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
    """Remove the temporary files that killed processes of this machine have left for a file."""
    folder, name = os.path.split(path)
    temporary = re.compile(rf"{re.escape(name)}\.{machine()}-(\d+)-(\d+)-\d+\.tmp", re.ASCII)
    with contextlib.suppress(OSError):  # the write itself says what is wrong with the folder
        for other in os.listdir(folder):
            match = temporary.fullmatch(other)
            if match is not None and not is_process_alive(int(match[1]), match[2]):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{folder}/{other}")
