"""The place of a checkpoint that takes the path of one which it replaces."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trainwright.checkpoint.filesystem import resolve
from trainwright.checkpoint.store import is_checkpoint, open_checkpoint, remove_checkpoint, same_place
from trainwright.errors import CheckpointError
from trainwright.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer


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


def is_taken(path: str) -> bool:
    """Return whether nothing can be written at a path: a checkpoint is there, a damaged one, or anything else."""
    files, inside = resolve(path)
    return files.exists(inside) if files.has_rename else is_checkpoint(path)


def is_replaceable(path: str) -> bool:
    """Return whether what has a path is a whole checkpoint that can make room: no link, and with no file of others in it."""
    if not resolve(path)[0].has_rename or _is_link(path):
        return False
    try:
        return not open_checkpoint(path, "off").extra_files  # those would stay, and their directory with them
    except CheckpointError:
        return False


def remove_replaced(paths: Sequence[str], committed: str, trainer: Trainer) -> list[str]:
    """Remove, on rank 0, checkpoints that a committed one takes the place of; return those that have to stay for now.

    That is the one which the run was resumed from; a later run, from another one, removes it. What is no whole checkpoint, or a
    symbolic link, is left alone, and nothing goes unless the committed one is whole.
    """
    kept = [each for each in paths if same_place(each, trainer.resume_source or "")]
    if trainer.is_global_zero and is_checkpoint(committed):
        for each in paths:
            if each not in kept and not same_place(each, committed) and not _is_link(each) and is_checkpoint(each):
                try:
                    remove_checkpoint(each)
                except (OSError, CheckpointError) as error:  # no reason to end a run whose newest checkpoint is whole
                    rank_zero_warn(
                        f"{each}, whose place {committed} takes, could not be removed ({error}); remove it by hand.",
                        stacklevel=2,
                    )
    return kept


def _is_link(path: str) -> bool:
    files, inside = resolve(path)
    return files.has_rename and os.path.islink(inside)


def replace_checkpoint(place: str, path: str) -> None:
    """Give a checkpoint the path of another one, which goes. At each moment one of the two is there, whole."""
    if not is_checkpoint(place):
        raise CheckpointError(f"{place} is no whole checkpoint, so that at {path} stays.")
    files, source = resolve(place)
    target = resolve(path)[1]
    if is_checkpoint(path):
        try:
            remove_checkpoint(path)
        except OSError as error:
            if files.exists(target):
                raise
            rank_zero_warn(f"{path} was replaced, but not all of it could be removed: {error}.", stacklevel=2)
    files.rename(source, target)
    files.sync_directory(os.path.dirname(target))
