"""The place of a checkpoint that takes the path of one which it replaces."""

from __future__ import annotations

import os
from collections.abc import Callable

from trainwright.checkpoint.filesystem import resolve
from trainwright.checkpoint.store import is_checkpoint, remove_checkpoint


def choose_place(
    name: Callable[[int | None], str], exists: Callable[[str], bool], is_replaced: Callable[[str], bool]
) -> tuple[str, str]:
    """Return the path of a save, the first that is free or is replaced by it, and where to write it: in a free one.

    Args:
        name: returns the path with a version; None for none.
        exists: returns whether a path is taken.
        is_replaced: returns whether what has a path makes room for this save.
    """
    path, version = name(None), 0
    while exists(path) and not is_replaced(path):
        version += 1
        path = name(version)
    place = path
    while exists(place):
        version += 1
        place = name(version)
    return path, place


def replace_checkpoint(place: str, path: str) -> None:
    """Give a checkpoint the path of another one, which goes. At each moment one of the two is there, whole."""
    if is_checkpoint(path):
        remove_checkpoint(path)
    files, source = resolve(place)
    target = resolve(path)[1]
    files.rename(source, target)
    files.sync_directory(os.path.dirname(target))
