"""Discovery: finds the checkpoints of a directory, and replaces and removes checkpoints.

A checkpoint is a directory with a manifest that matches its digest. Checkpoints are ordered by step, never by file times.
While one checkpoint replaces another, and after a crash at any moment, one of the two is complete.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from trainwright.checkpoint.filesystem import OUR_FILE, Files, describe, resolve, temporary_path
from trainwright.checkpoint.last_link import is_last_link
from trainwright.checkpoint.manifest import MANIFEST_NAME, MAX_JSON_BYTES, FormatRefused, Manifest, parse
from trainwright.errors import CheckpointError, MissingCheckpoint

__all__ = ["CheckpointEntry", "find_candidates", "same_path"]

_STEP_IN_NAME = re.compile(r"step=(\d+)", re.ASCII)
_STEP_IN_MANIFEST = re.compile(rb'"step": ?(\d{1,18})\b')


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint in a directory.

    If it is damaged, its `step` comes from its files or its name, or is infinity. `number` orders the saves of one step.
    `damage` describes a fault of the manifest. If it `is_refused`, the checkpoint is complete, but has an unknown format
    version.
    """

    path: str
    step: float
    epoch: int
    weights_only: bool = False
    number: int = 0
    damage: str = ""
    is_refused: bool = False

    @property
    def order(self) -> tuple[float, ...]:
        """Return the sort key. At the same step a full checkpoint comes after a checkpoint with weights only."""
        return self.step, not self.weights_only, self.number, self.epoch


def read_manifest(files: Files, path: str) -> Manifest:
    """Read and check the manifest of a directory. CheckpointError if it is missing or damaged."""
    try:
        listed = files.listing(path)
    except FileNotFoundError as error:
        raise MissingCheckpoint(
            f"{path} is not a checkpoint: it does not exist. Give the directory of a checkpoint."
        ) from error
    except NotADirectoryError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint: it is a file, and a checkpoint is a directory. The weights in a Lightning .ckpt or "
            "another file of torch.save are loaded by the Module's load_from_checkpoint, and converted by `trainwright "
            "checkpoint import`."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} is not a checkpoint: it cannot be read as a directory ({error}).") from error
    size = listed.get(MANIFEST_NAME)
    if size is None:
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {MANIFEST_NAME} that is a plain file. Either its save never finished, or "
            "another library wrote it. Pass the directory of a checkpoint of trainwright."
        )
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {MANIFEST_NAME} has {size} bytes, more than trainwright ever writes.")
    try:
        with files.open(f"{path}/{MANIFEST_NAME}") as stream:
            return parse(stream.read())
    except OSError as error:
        raise CheckpointError(f"{path}: {MANIFEST_NAME} cannot be read: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def find_checkpoints(directory: str) -> list[CheckpointEntry]:
    """Return the checkpoints directly in a directory in the order of their steps."""
    return [entry for entry in find_candidates(directory) if not entry.damage]


def find_candidates(directory: str) -> list[CheckpointEntry]:
    """Return the checkpoints directly in a directory in the order of their steps, also with a missing or damaged manifest.

    Names that start with a dot (temporary directories), symbolic links, and directories that do not look like checkpoints are
    skipped. On a file system without rename a directory without a manifest was never finished. It is skipped too.
    """
    files, inside = resolve(directory)
    try:
        names = [name for name, size in files.listing(inside).items() if size is None and not name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be searched for checkpoints: {error}. Make it readable.") from error
    found = []
    for name in names:
        if _is_link(files, f"{inside}/{name}"):
            continue
        path = f"{os.fspath(directory).rstrip('/')}/{name}"
        try:
            manifest = read_manifest(files, f"{inside}/{name}")
        except CheckpointError as error:
            found += [] if is_last_link(path) else _damaged(files, f"{inside}/{name}", path, error)
            continue
        header = manifest.header
        # Older headers lack weights_only, but a full checkpoint has files of all ranks.
        without = not any(file.startswith("rank-") for file in manifest.files)
        weights_only = bool(header.get("weights_only", without))
        number = header.get("number")
        number = number if type(number) is int else 0
        found.append(CheckpointEntry(path, header["step"], header["epoch"], weights_only, number))
    # Finally, the longer name is the newer checkpoint, because it has a version ("-v1").
    return sorted(found, key=lambda entry: (*entry.order, len(entry.path), entry.path))


def _damaged(files: Files, inside: str, path: str, error: CheckpointError) -> list[CheckpointEntry]:
    """Return the entry of a damaged checkpoint, or nothing if it does not look like a checkpoint."""
    try:
        listed = files.listing(inside)
    except OSError:
        listed = {}
    if not looks_ours(path, listed) or (MANIFEST_NAME not in listed and not files.has_rename):
        return []
    named = _STEP_IN_NAME.search(os.path.basename(path))
    step = int(named[1]) if named else math.inf
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        if listed.get(MANIFEST_NAME) is not None:  # a plain file, since a pipe would block
            with files.open(f"{inside}/{MANIFEST_NAME}") as stream:
                written = _STEP_IN_MANIFEST.search(stream.read(4096))
            step = int(written[1]) if written else step
        elif listed.get("state.json") is not None and not named:
            with files.open(f"{inside}/state.json") as stream:
                step = int(json.loads(stream.read(MAX_JSON_BYTES))["position"]["step"])
    text = str(error).removeprefix(f"{inside}: ")
    return [CheckpointEntry(path, step, 0, damage=text, is_refused=isinstance(error.__cause__, FormatRefused))]


def looks_ours(path: str, names: Iterable[str]) -> bool:
    """Return whether the name of a directory or of its files is one of a checkpoint."""
    return path.endswith(".ckpt") or any(OUR_FILE.fullmatch(name) for name in names)


def same_path(left: str, right: str) -> bool:
    """Return whether two paths or URLs lead to the same file or directory, also through symbolic links."""
    return bool(left) and bool(right) and _resolved(left) == _resolved(right)


def _resolved(path: str) -> tuple[bool, str]:
    files, inside = resolve(path)
    return files.has_rename, os.path.realpath(inside) if files.has_rename else inside


def is_checkpoint(path: str) -> bool:
    """Return whether a directory has a valid manifest. Other files are not checked."""
    files, inside = resolve(path)
    try:
        read_manifest(files, inside)
    except CheckpointError:
        return False
    return True


def remove_checkpoint(path: str) -> None:
    """Remove a checkpoint. After a crash midway the rest never looks like a complete checkpoint.

    Foreign files stay, and so does the directory with them. CheckpointError if this is not a checkpoint.
    """
    files, inside = resolve(path)
    if _is_link(files, inside):
        raise CheckpointError(f"{path} is a symbolic link and was not removed. Pass the directory that it points to.")
    manifest = read_manifest(files, inside)
    present = listing_of(files, inside, manifest)
    if files.has_rename and present.keys() <= manifest.own_names:
        temporary = temporary_path(inside)
        files.rename(inside, temporary)
        # Before its files are removed, because after a power loss the old name must not lead to half a checkpoint.
        files.sync_directory(os.path.dirname(inside))
        files.remove_tree(temporary)
        return
    # The manifest first, and durably. Without it the rest is no checkpoint if a crash interrupts the removal.
    for name in (MANIFEST_NAME, *sorted(manifest.all_files)):
        if name in present:
            files.remove_file(f"{inside}/{name}")
        if name == MANIFEST_NAME:
            files.sync_directory(inside)
    for folder in sorted(manifest.own_names - manifest.all_files.keys() - {MANIFEST_NAME}, reverse=True):
        files.remove_empty(f"{inside}/{folder}")
    files.remove_empty(inside)


def is_newest(path: str) -> bool:
    """Return whether this is the newest complete checkpoint in its folder, ignoring weights-only checkpoints."""
    try:
        entries = find_checkpoints(os.path.dirname(path.rstrip("/")) or ".")
    except CheckpointError:  # the folder cannot be listed
        return False
    newest = next((entry for entry in reversed(entries) if not entry.weights_only), None)
    return newest is not None and same_path(newest.path, path)


def listing_of(files: Files, path: str, manifest: Manifest) -> dict[str, int | None]:
    """Return the listing of a checkpoint's directory, and of its folders with attached files (OSError)."""
    listed = files.listing(path)
    for folder in sorted(manifest.own_names - manifest.all_files.keys() - {MANIFEST_NAME}):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not _is_link(files, f"{path}/{folder}"):
                listed |= {f"{folder}/{name}": size for name, size in files.listing(f"{path}/{folder}").items()}
    return listed


def remove_older(paths: Iterable[str], committed: str) -> None:
    """Remove the checkpoints that a committed checkpoint replaces. If one cannot be removed, warn.

    Symbolic links and incomplete checkpoints stay. If the committed checkpoint is not complete, nothing is removed.
    """
    if not is_checkpoint(committed):
        return
    for path in paths:
        if not same_path(path, committed) and not _is_link(*resolve(path)) and is_checkpoint(path):
            try:
                remove_checkpoint(path)
            except (OSError, CheckpointError) as error:  # a warning suffices, because the newest checkpoint is complete
                text = f"{path}, which {committed} replaces, could not be removed ({error}). Remove it by hand."
                warnings.warn(text, stacklevel=3)


def _is_link(files: Files, path: str) -> bool:
    return files.has_rename and os.path.islink(path)


def is_replaceable(path: str) -> bool:
    """Return whether a path is a complete checkpoint that can be replaced: not a link, and without foreign files."""
    files, inside = resolve(path)
    return not _objection(files, inside) and is_checkpoint(path) and not _others(files, inside)


def refuse_irreplaceable(files: Files, path: str) -> None:
    """Reject a path that a checkpoint cannot replace (CheckpointError)."""
    if objection := _objection(files, path):
        raise CheckpointError(
            f"{path} exists already and cannot be replaced by a checkpoint: {objection}. Remove it, or choose another name."
        )


def _objection(files: Files, path: str) -> str:
    """Return why a checkpoint cannot replace an existing path, or an empty text if it can."""
    if not files.has_rename:
        return "its file system has no rename, which a replacement needs"
    if _is_link(files, path):
        return "it is a symbolic link"
    if f"{os.getcwd()}/".startswith(f"{os.path.realpath(path)}/"):
        return "the working directory is in it"
    try:
        read_manifest(files, path)
    except CheckpointError as error:
        names = files.listing(path) if os.path.isdir(path) else (MANIFEST_NAME,)
        if any(name == MANIFEST_NAME or OUR_FILE.fullmatch(name) for name in names):
            return str(error).removesuffix(".")
    return ""


def _others(files: Files, path: str) -> set[str]:
    """Return the names of the files at a path that do not belong to its checkpoint."""
    names: set[str] = set()
    with contextlib.suppress(CheckpointError):
        names = read_manifest(files, path).own_names
    return files.tree(path).keys() - names


def versioned_path(files: Files, path: str) -> str:
    """Return the first free path with a version, at which a search finds checkpoints."""
    stem, number = path.removesuffix(".ckpt"), 1
    while files.exists(free := f"{stem}-v{number}{path[len(stem) :]}"):
        number += 1
    return free


def replace_checkpoint(newer: str, path: str) -> None:
    """Rename a complete checkpoint to the path of an older checkpoint, which is removed. Other files at that path stay.

    If the file system can exchange two directories, the path always has one of the two checkpoints. Otherwise the path is
    free for a moment between two renames, and the newer checkpoint has a name with a version until then. On a CheckpointError
    nothing was replaced, and a newer checkpoint with a visible name keeps its name.
    """
    files, source = resolve(newer)
    target = resolve(path)[1]
    parent = os.path.dirname(target)
    replaces, old, is_exchanged = files.exists(target), "", False
    if replaces and not is_checkpoint(newer):
        raise CheckpointError(f"{newer} is not a complete checkpoint, so {path} is not replaced.")
    try:
        if replaces:
            refuse_irreplaceable(files, target)
            _copy_others(files, target, source)
            is_exchanged = files.exchange(source, target)
            if not is_exchanged:
                if os.path.basename(source).startswith("."):
                    files.rename(source, free := versioned_path(files, target))
                    source = free
                    files.sync_directory(parent)
                old = temporary_path(target)
                # Two renames, because a rename cannot replace a directory that is not empty.
                files.rename(target, old)
        if not is_exchanged:
            files.rename(source, target)
        files.sync_directory(parent)
    except (OSError, CheckpointError) as error:
        with contextlib.suppress(OSError):
            if is_exchanged:  # the exchange may not be durable
                files.exchange(source, target)
            elif not files.exists(source):
                files.rename(target, source)
            if old:
                files.rename(old, target)
        text = describe(error, target)
        if os.path.basename(source).startswith("."):
            raise CheckpointError(f"the complete checkpoint could not be renamed to {path}: {text}") from error
        raise CheckpointError(f"{source} is complete, but could not be renamed to {path}: {text}") from error
    if old or is_exchanged:
        _remove_replaced(files, old or source, target)


def _copy_others(files: Files, target: str, source: str) -> None:
    """Copy the folders at the target to the newer checkpoint, with their modes, and link the other files there."""
    for folder, _, _ in os.walk(target):
        copy = os.path.join(source, os.path.relpath(folder, target))
        os.makedirs(copy, exist_ok=True)
        shutil.copymode(folder, copy)
    for name in _others(files, target) - files.tree(source).keys():
        files.link(f"{target}/{name}", f"{source}/{name}")


def _remove_replaced(files: Files, old: str, target: str) -> None:
    """Remove the replaced directory, but move files that were written into it meanwhile."""
    try:
        if not os.path.basename(old).startswith("."):
            files.rename(old, hidden := temporary_path(target))  # so that no search finds half a checkpoint
            old = hidden
        for name in files.listing(old).keys() - (read_manifest(files, old).own_names if is_checkpoint(old) else set()):
            if not files.exists(f"{target}/{name}"):
                files.rename(f"{old}/{name}", f"{target}/{name}")
        files.remove_tree(old)
    except OSError as error:  # the rest has a temporary name, so a later run removes it
        warnings.warn(f"{target} was replaced, but not all of it could be removed: {error}.", stacklevel=3)
