"""Finding the checkpoints of a directory, and removing one.

A checkpoint is a directory whose manifest reads and matches its own digest; order is by step, never by file times. What was
one and is no more is found too, with what is wrong, by those who ask for candidates.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from dataclasses import dataclass

from trainwright.checkpoint.filesystem import Files, resolve
from trainwright.checkpoint.manifest import MANIFEST_NAME, MAX_JSON_BYTES, FormatRefused, Manifest, parse
from trainwright.checkpoint.temporary import temporary_path
from trainwright.errors import CheckpointError

_OURS = re.compile(r"(?:[a-z][a-z0-9_]*-\d{5}\.safetensors|rank-\d{5}\.json)", re.ASCII)
_STEP_IN_NAME = re.compile(r"step=(\d+)", re.ASCII)
_STEP_IN_MANIFEST = re.compile(rb'"step": ?(\d{1,18})\b')


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint that was found.

    Args:
        path: its path, as the directory's was given.
        step: the optimizer steps made; of a damaged one what its files or its name still tell, infinite where nothing does.
        epoch: the epoch of the save.
        weights_only: whether no run can go on from it.
        number: of several saves of one step the later one has the higher.
        damage: what is wrong with its manifest; empty for a sound one.
        is_refused: whether it is whole, but of a format that this version does not read (`damage` says which).
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
        """Return what puts checkpoints in order; of one step, what holds all is after the weights alone."""
        return self.step, not self.weights_only, self.number, self.epoch


def read_manifest(files: Files, path: str) -> Manifest:
    """Read and check the manifest of a directory.

    Raises:
        CheckpointError: there is none, or it is not sound.
    """
    try:
        listed = files.listing(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint: it does not exist. Give the directory of a checkpoint."
        ) from error
    except NotADirectoryError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint: it is a file, and a checkpoint is a directory. The weights in a Lightning .ckpt or "
            "another file of torch.save are taken by load_from_checkpoint of the Module, and made a checkpoint by `trainwright "
            "checkpoint import`."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} is not a checkpoint: it is no directory that can be read ({error}).") from error
    size = listed.get(MANIFEST_NAME)
    if size is None:
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {MANIFEST_NAME} that is a plain file. Give the directory of a "
            "checkpoint; one without a manifest was never finished."
        )
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {MANIFEST_NAME} has {size} bytes, more than any that trainwright writes.")
    try:
        with files.open(f"{path}/{MANIFEST_NAME}") as stream:
            data = stream.read()
        return parse(data)
    except OSError as error:
        raise CheckpointError(f"{path}: {MANIFEST_NAME} cannot be read: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def find_checkpoints(directory: str) -> list[CheckpointEntry]:
    """Return the checkpoints directly in a directory by ascending step; anything else there is passed over."""
    return [entry for entry in find_candidates(directory) if not entry.damage]


def find_candidates(directory: str) -> list[CheckpointEntry]:
    """Return the checkpoints directly in a directory by ascending step, with those whose manifest is missing or damaged.

    What begins with a dot (temporary directories), what a symbolic link leads to, and directories that do not look like
    checkpoints of ours are passed over; so is one without a manifest where there is no rename, which nobody has finished.
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
            entry = _damaged(files, f"{inside}/{name}", path, error)
        else:
            # A run's own state is in it, unless it is to be without: an older header does not say so.
            without = not any(file.startswith("rank-") for file in manifest.files)
            header = manifest.header
            weights_only = bool(header.get("weights_only", without))
            number = header.get("number", 0)
            number = number if type(number) is int else 0
            entry = CheckpointEntry(path, header["step"], header["epoch"], weights_only, number)
        found += [entry] if entry is not None else []
    # Of those that nothing else puts in order, a name with a version ("-v1"), the longer one, is the newer.
    return sorted(found, key=lambda entry: (*entry.order, len(entry.path), entry.path))


def _damaged(files: Files, inside: str, path: str, error: CheckpointError) -> CheckpointEntry | None:
    """Return what is left of a checkpoint; None for what does not look like one."""
    try:
        listed = files.listing(inside)
    except OSError:
        listed = {}
    is_ours = path.endswith(".ckpt") or any(_OURS.fullmatch(name) for name in listed)
    if not is_ours or (MANIFEST_NAME not in listed and not files.has_rename):
        return None
    step: float = math.inf
    named = _STEP_IN_NAME.search(os.path.basename(path))
    if named:
        step = int(named[1])
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        if listed.get(MANIFEST_NAME) is not None:  # a plain file: nobody waits for a pipe
            with files.open(f"{inside}/{MANIFEST_NAME}") as stream:
                written = _STEP_IN_MANIFEST.search(stream.read(4096))
            step = int(written[1]) if written else step
        elif listed.get("state.json") is not None and not named:
            with files.open(f"{inside}/state.json") as stream:
                step = int(json.loads(stream.read(MAX_JSON_BYTES))["position"]["step"])
    text = str(error).removeprefix(f"{inside}: ")
    return CheckpointEntry(path, step, 0, damage=text, is_refused=isinstance(error.__cause__, FormatRefused))


def latest_checkpoint(directory: str) -> CheckpointEntry | None:
    """Return the checkpoint of the highest step in a directory, or None."""
    found = find_checkpoints(directory)
    return found[-1] if found else None


def same_path(left: str, right: str) -> bool:
    """Return whether two paths or URLs mean the same place, however they are spelled and by whatever links they lead there."""
    return bool(left) and bool(right) and _place(left) == _place(right)


def _place(path: str) -> tuple[bool, str]:
    files, inside = resolve(path)
    return files.has_rename, os.path.realpath(inside) if files.has_rename else inside


def is_checkpoint(path: str) -> bool:
    """Return whether a directory holds a sound manifest; its other files are not looked at."""
    files, inside = resolve(path)
    try:
        read_manifest(files, inside)
    except CheckpointError:
        return False
    return True


def remove_checkpoint(path: str) -> None:
    """Remove a checkpoint so that a crash on the way never leaves half of one that looks whole.

    Files that are not the checkpoint's own are left where they are, and the directory with them.

    Raises:
        CheckpointError: the path is not a checkpoint; nothing was removed.
    """
    files, inside = resolve(path)
    if _is_link(files, inside):
        raise CheckpointError(f"{path} is a symbolic link and was not removed; give the directory it points to.")
    manifest = read_manifest(files, inside)
    own = {MANIFEST_NAME, *manifest.files}
    present = files.listing(inside)
    if files.has_rename and present.keys() <= own:
        temporary = temporary_path(inside)
        files.rename(inside, temporary)
        files.sync_directory(os.path.dirname(inside))
        files.remove_tree(temporary)
        return
    for name in (MANIFEST_NAME, *sorted(manifest.files)):
        if name in present:
            files.remove_file(f"{inside}/{name}")
        if name == MANIFEST_NAME:
            files.sync_directory(inside)
    files.remove_empty(inside)


def _is_link(files: Files, path: str) -> bool:
    return files.has_rename and os.path.islink(path)
