"""Finding the checkpoints of a directory, and removing one.

A checkpoint is a directory with a manifest that matches its own digest; checkpoints are ordered by step, never by file times.
`find_candidates` also returns damaged ones, and what is wrong with them.
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
        path: its path, relative if the directory's was.
        step: the optimizer steps made; for a damaged one what its files or its name still say, else infinity.
        epoch: the epoch of the save.
        weights_only: whether no run can resume from it.
        number: orders several saves of one step.
        damage: what is wrong with its manifest; empty if nothing is.
        is_refused: whether it is whole, but of a format version that this version does not read (`damage` says which).
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
        """Return the sort key; of one step, a whole checkpoint comes after one with weights only."""
        return self.step, not self.weights_only, self.number, self.epoch


def read_manifest(files: Files, path: str) -> Manifest:
    """Read and check the manifest of a directory.

    Raises:
        CheckpointError: it is missing or damaged.
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
            "another file of torch.save are loaded by the Module's load_from_checkpoint, and converted by `trainwright "
            "checkpoint import`."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} is not a checkpoint: it cannot be read as a directory ({error}).") from error
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
    """Return the checkpoints directly in a directory by ascending step."""
    return [entry for entry in find_candidates(directory) if not entry.damage]


def find_candidates(directory: str) -> list[CheckpointEntry]:
    """Return the checkpoints directly in a directory by ascending step, including those with a missing or damaged manifest.

    Skipped are names that start with a dot (temporary directories), symbolic links, and directories that do not look like
    checkpoints. Without rename, a directory without a manifest was never finished, and is skipped too.
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
            # Older headers do not say weights_only; a whole checkpoint has the state of each rank.
            without = not any(file.startswith("rank-") for file in manifest.files)
            header = manifest.header
            weights_only = bool(header.get("weights_only", without))
            number = header.get("number", 0)
            number = number if type(number) is int else 0
            entry = CheckpointEntry(path, header["step"], header["epoch"], weights_only, number)
        found += [entry] if entry is not None else []
    # As the last resort, the longer name is the newer one: it has a version ("-v1").
    return sorted(found, key=lambda entry: (*entry.order, len(entry.path), entry.path))


def _damaged(files: Files, inside: str, path: str, error: CheckpointError) -> CheckpointEntry | None:
    """Return the entry of a damaged checkpoint; None if it does not look like a checkpoint."""
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
        if listed.get(MANIFEST_NAME) is not None:  # a plain file: a pipe would block
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
    """Return whether two paths or URLs lead to the same file or directory, symbolic links resolved."""
    return bool(left) and bool(right) and _resolved(left) == _resolved(right)


def _resolved(path: str) -> tuple[bool, str]:
    files, inside = resolve(path)
    return files.has_rename, os.path.realpath(inside) if files.has_rename else inside


def is_checkpoint(path: str) -> bool:
    """Return whether a directory has a valid manifest; other files are not checked."""
    files, inside = resolve(path)
    try:
        read_manifest(files, inside)
    except CheckpointError:
        return False
    return True


def remove_checkpoint(path: str) -> None:
    """Remove a checkpoint so that a crash midway never leaves half of one that looks whole.

    Files that are not the checkpoint's are left, and the directory with them.

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
