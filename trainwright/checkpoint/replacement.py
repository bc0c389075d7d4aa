"""Replacement: a new checkpoint takes the path of an old one, which is removed. At any moment one of the two is whole."""

from __future__ import annotations

import contextlib
import os
import warnings

from trainwright.checkpoint.discovery import is_checkpoint, read_manifest
from trainwright.checkpoint.filesystem import Files, describe, resolve
from trainwright.checkpoint.manifest import MANIFEST_NAME
from trainwright.checkpoint.temporary import temporary_path
from trainwright.errors import CheckpointError


def is_link(path: str) -> bool:
    """Return whether a path is a symbolic link."""
    files, inside = resolve(path)
    return files.has_rename and os.path.islink(inside)


def is_replaceable(path: str) -> bool:
    """Return whether a path is a whole checkpoint that can be replaced: no link, and without foreign files."""
    return not _objection(*resolve(path))


def refuse_irreplaceable(files: Files, path: str) -> None:
    """Refuse a path that is taken and cannot be replaced (CheckpointError)."""
    if objection := _objection(files, path):
        raise CheckpointError(
            f"{path} exists already, and overwrite=True only replaces a whole checkpoint: {objection}. Remove it, or choose "
            "another name."
        )


def _objection(files: Files, path: str) -> str:
    """Return why a path cannot be replaced by a checkpoint; empty if it can."""
    if not files.has_rename:
        return "its file system has no rename, by which one replaces the other"
    if os.path.islink(path):
        return "it is a symbolic link"
    try:
        own = {MANIFEST_NAME, *read_manifest(files, path).files}
    except CheckpointError as error:
        return str(error).removesuffix(".")
    others = sorted(files.listing(path).keys() - own)
    return f"it also holds {others[0]}, which is not the checkpoint's" if others else ""


def versioned_path(files: Files, path: str) -> str:
    """Return the first free path with a version; a search for checkpoints finds it there."""
    stem, number = path.removesuffix(".ckpt"), 1
    while files.exists(free := f"{stem}-v{number}{path[len(stem) :]}"):
        number += 1
    return free


def replace_checkpoint(newer: str, path: str) -> None:
    """Rename a whole checkpoint to the path of an older one, which is removed. Between two renames neither has that path.

    Raises:
        CheckpointError: nothing was replaced; both checkpoints are where they were.
    """
    files, source = resolve(newer)
    target = resolve(path)[1]
    if not is_checkpoint(newer):
        raise CheckpointError(f"{newer} is not a whole checkpoint, so {path} is kept.")
    old = ""
    try:
        if files.exists(target):
            refuse_irreplaceable(files, target)
            old = temporary_path(target)
            files.rename(target, old)
        files.rename(source, target)
        files.sync_directory(os.path.dirname(target))
    except (OSError, CheckpointError) as error:
        with contextlib.suppress(OSError):
            if not files.exists(source):  # not known to be durable
                files.rename(target, source)
            if old:
                files.rename(old, target)
        text = describe(error, target)
        raise CheckpointError(f"{newer} is whole, but could not be renamed to {path}: {text}") from error
    if old:
        try:
            files.remove_tree(old)
        except OSError as error:  # the rest has a temporary name, so a later run sweeps it
            warnings.warn(f"{path} was replaced, but not all of it could be removed: {error}.", stacklevel=2)
