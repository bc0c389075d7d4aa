"""Finding the checkpoints of a directory, removing one, and sweeping what writers that died left behind.

A checkpoint is a directory whose manifest reads and matches its own digest; order is by step, never by file times.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import uuid
from dataclasses import dataclass

from trainwright.checkpoint.filesystem import Files, resolve
from trainwright.checkpoint.manifest import MANIFEST_NAME, MAX_JSON_BYTES, Manifest, parse
from trainwright.errors import CheckpointError

# .<name>.tmp-<host>-<pid>-<start of the process>-<unique>: who writes it stands in the name, so one mkdir records it.
_TEMPORARY = re.compile(r"\..+\.tmp-([0-9a-f]{8})-(\d+)-(\d+)-[0-9a-f]{12}", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint that was found."""

    path: str
    step: int
    epoch: int


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
    files, inside = resolve(directory)
    found = []
    try:
        names = [name for name, size in files.listing(inside).items() if size is None and not name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        with contextlib.suppress(CheckpointError):
            if not _is_link(files, f"{inside}/{name}"):
                header = read_manifest(files, f"{inside}/{name}").header
                path = f"{os.fspath(directory).rstrip('/')}/{name}"
                found.append(CheckpointEntry(path, header["step"], header["epoch"]))
    # Of one step, a name with a version ("-v1") is the newer: it is the longer one.
    return sorted(found, key=lambda entry: (entry.step, entry.epoch, len(entry.path), entry.path))


def latest_checkpoint(directory: str) -> CheckpointEntry | None:
    """Return the checkpoint of the highest step in a directory, or None."""
    found = find_checkpoints(directory)
    return found[-1] if found else None


def same_place(left: str, right: str) -> bool:
    """Return whether two paths or URLs mean the same place, however they are spelled."""
    return bool(left) and bool(right) and resolve(left)[1] == resolve(right)[1]


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
        temporary = temporary_beside(inside)
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


def sweep_temporaries(directory: str) -> list[str]:
    """Remove the temporary directories of writers on this machine that are gone, and return their names.

    Those of other machines, and of processes that live, are left alone.
    """
    files, inside = resolve(directory)
    if not files.has_rename or not os.path.isdir(inside):
        return []
    swept = []
    for name, size in sorted(files.listing(inside).items()):
        match = _TEMPORARY.fullmatch(name)
        path = f"{inside}/{name}"
        if match is None or size is not None or _is_link(files, path) or match[1] != _machine():
            continue
        if not _lives(int(match[2]), match[3]):
            files.remove_tree(path)
            swept.append(name)
    return swept


def temporary_beside(path: str) -> str:
    """Return an unused name beside a path that records which process it belongs to."""
    parent, name = os.path.split(path)
    pid = os.getpid()
    return f"{parent}/.{name}.tmp-{_machine()}-{pid}-{_process_start(pid)}-{uuid.uuid4().hex[:12]}"


def _machine() -> str:
    # Containers may share a host name; the namespace of process ids then differs.
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def _process_start(pid: int) -> str:
    # Process ids come round again, so the time a process started (ticks since boot) goes with it; "0" where unknown.
    with contextlib.suppress(OSError, IndexError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]  # a zombie writes nothing any more
    return "0"


def _lives(pid: int, start: str) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return _process_start(pid) == start


def _is_link(files: Files, path: str) -> bool:
    return files.has_rename and os.path.islink(path)
