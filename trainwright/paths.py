"""Paths that mean the same wherever the working directory is later."""

from __future__ import annotations

import os


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a local path with `~` and the working directory of now written out; a URL as it is."""
    text = os.path.expanduser(os.fspath(path))
    return text if "://" in text or "::" in text else os.path.abspath(text)
