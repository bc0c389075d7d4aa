"""The place of a checkpoint that takes the path of one which it replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from trainwright.checkpoint.filesystem import resolve
from trainwright.checkpoint.replacement import is_link, is_replaceable
from trainwright.checkpoint.store import is_checkpoint, remove_checkpoint, same_path
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


def makes_room(path: str, dropped: Sequence[str], kept: Iterable[str], source: str, may_go: bool) -> bool:
    """Return whether what has a path makes room for a save that takes it.

    Args:
        path: where something is.
        dropped: checkpoints that go for this save.
        kept: those that are kept.
        source: the one that the run was resumed from, which stays.
        may_go: whether it makes room without being among those that go, if it is a whole checkpoint and not kept.
    """
    is_dropped = any(same_path(path, each) for each in dropped)
    if (not is_dropped and not may_go) or same_path(path, source):  # first, since the rest reads a manifest
        return False
    is_kept = not is_dropped and any(same_path(path, each) for each in kept)
    return not is_kept and is_replaceable(path)


def is_taken(path: str) -> bool:
    """Return whether nothing can be written at a path: a checkpoint is there, a damaged one, or anything else."""
    files, inside = resolve(path)
    return files.exists(inside) if files.has_rename else is_checkpoint(path)


def remove_replaced(paths: Sequence[str], committed: str, trainer: Trainer) -> list[str]:
    """Remove, on rank 0, checkpoints that a committed one takes the place of; return those that have to stay for now.

    That is the one which the run was resumed from; a later run, from another one, removes it. What is no whole checkpoint, or a
    symbolic link, is left alone, and nothing goes unless the committed one is whole.
    """
    kept = [each for each in paths if same_path(each, trainer.resume_source or "")]
    if trainer.is_global_zero and is_checkpoint(committed):
        for each in paths:
            if each not in kept and not same_path(each, committed) and not is_link(each) and is_checkpoint(each):
                try:
                    remove_checkpoint(each)
                except (OSError, CheckpointError) as error:  # no reason to end a run whose newest checkpoint is whole
                    rank_zero_warn(
                        f"{each}, whose place {committed} takes, could not be removed ({error}); remove it by hand.",
                        stacklevel=2,
                    )
    return kept
