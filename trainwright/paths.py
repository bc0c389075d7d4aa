"""Paths that do not depend on the working directory, and opening of files that are not symbolic links."""

from __future__ import annotations

import errno
import os

__all__ = ["absolute"]


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a local path as an absolute one, with `~` expanded; a URL unchanged. ValueError for a path with "::"."""
    text = os.path.expanduser(os.fspath(path))
    text = text if "://" in text else os.path.abspath(text)
    if "::" in text and "://" not in text:
        raise ValueError(
            f"the path {text!r} has '::', which fsspec reads as a chain of file systems; choose a name without it."
        )
    return text


def open_no_link(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file as `os.open` does, but refuse a symbolic link; an `opener` for `open`.

    Raises:
        OSError: it is a symbolic link.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        text = "it is a symbolic link, which is never written through; remove it, or give another folder"
        raise OSError(errno.ELOOP, text, path) from error
