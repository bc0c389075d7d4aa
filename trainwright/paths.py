"""Paths that mean the same wherever the working directory is later, and files that are no links to others."""

from __future__ import annotations

import errno
import os


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a local path with `~` and the working directory of now written out; a URL as it is."""
    text = os.path.expanduser(os.fspath(path))
    return text if "://" in text or "::" in text else os.path.abspath(text)


def open_no_link(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file as `os.open` does, but not what a symbolic link in its place leads to; an `opener` for `open`.

    Raises:
        OSError: it is a symbolic link.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(
            errno.ELOOP,
            "it is a symbolic link, and nothing is written through one; remove it, or give another folder",
            path,
        ) from error
