"""The link to the newest checkpoint of a folder: a symbolic link, or a directory with a pointer if links are impossible."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import PurePosixPath

from trainwright.checkpoint.filesystem import Files, note_new, resolve, temporary_path

POINTER_NAME = "pointer.json"


def point_to(link: str, target: str) -> None:
    """Point `link` to the checkpoint `target` in or below its folder, in one step (OSError if it cannot be written)."""
    files, inside = resolve(link)
    # Relative to the folder, so that the link stays valid if the folder is moved.
    name = target.rstrip("/").removeprefix(f"{os.path.dirname(link)}/")
    if not files.has_rename:
        files.make_directories(inside)
        files.put(f"{inside}/{POINTER_NAME}", _pointer(name))
        return
    note_new(inside)
    temporary = temporary_path(inside)
    try:
        os.symlink(name, temporary)
    except OSError:  # this file system has no symbolic links
        with contextlib.suppress(FileExistsError):
            os.mkdir(inside)
        temporary = temporary_path(f"{inside}/{POINTER_NAME}")
        files.put(temporary, _pointer(name))
        os.replace(temporary, f"{inside}/{POINTER_NAME}")
    else:
        try:
            os.replace(temporary, inside)
        except OSError:
            os.unlink(temporary)
            raise
    files.sync_directory(os.path.dirname(inside))


def _pointer(name: str) -> bytes:
    return json.dumps({"checkpoint": name}).encode()


def pointed(path: str) -> str:
    """Return the checkpoint that a link leads to, or the path itself if it is no link.

    A run resumes from that checkpoint, even if the link changes later.
    """
    name = _target(*resolve(path))
    return f"{path.rstrip('/').rpartition('/')[0] or '.'}/{name}" if name else path


def is_last_link(path: str) -> bool:
    """Return whether a path is such a link."""
    return bool(_target(*resolve(path)))


def remove_link(path: str) -> None:
    """Remove such a link. Anything else stays."""
    files, inside = resolve(path)
    if not _target(files, inside):
        return
    if files.has_rename and os.path.islink(inside):
        files.remove_file(inside)
    else:
        files.remove_file(f"{inside}/{POINTER_NAME}")
        files.remove_empty(inside)


def _target(files: Files, inside: str) -> str:
    """Return a link's target relative to its folder, or "" if it is not a link, or leads out of that folder."""
    name = ""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if files.has_rename and stat.S_ISLNK(os.lstat(inside).st_mode):
            name = os.readlink(inside)
        elif files.exists(f"{inside}/{POINTER_NAME}"):
            with files.open(f"{inside}/{POINTER_NAME}") as stream:
                name = str(json.loads(stream.read(4096))["checkpoint"])
    parts = PurePosixPath(name).parts  # an absolute path begins with "/"
    return "" if ".." in parts or parts[:1] == ("/",) or name == "." else name
