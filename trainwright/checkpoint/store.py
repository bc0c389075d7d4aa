"""Writing a checkpoint so that it exists whole or not at all; the public names of this part are gathered here.

Rank 0 creates a temporary directory next to the target; every rank writes its files there, hashed on the way and synced; rank 0
writes the manifest last, renames the directory and syncs its parent. After each of the three steps the ranks exchange results:
every rank reaches each exchange, and a failure on one rank is the same error on all. Without rename (object stores) the files
are written under their final names, and the manifest, written last, is the commit.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from trainwright.checkpoint.codec import encode_stored
from trainwright.checkpoint.discovery import (
    CheckpointEntry,
    find_candidates,
    find_checkpoints,
    is_checkpoint,
    latest_checkpoint,
    remove_checkpoint,
    same_path,
)
from trainwright.checkpoint.filesystem import Files, describe, resolve
from trainwright.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    check_tensors,
    dump_json,
    rank_section,
    render,
    table_from_json,
    table_to_json,
)
from trainwright.checkpoint.reader import Checkpoint, ReadReport, open_checkpoint
from trainwright.checkpoint.replacement import refuse_irreplaceable, replace_checkpoint, versioned_path
from trainwright.checkpoint.shards import FileRecord, HashingStream, check_storable, write_shard
from trainwright.checkpoint.temporary import sweep_temporaries, temporary_path
from trainwright.checkpoint.tensors import Piece, TensorEntry, assign_writers, merge
from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError

SAVE = "the save of a checkpoint"
"""What the ranks do together here, by name."""

__all__ = [
    "Checkpoint",
    "CheckpointEntry",
    "Piece",
    "ReadReport",
    "TensorEntry",
    "encode_state",
    "find_candidates",
    "find_checkpoints",
    "is_checkpoint",
    "latest_checkpoint",
    "open_checkpoint",
    "remove_checkpoint",
    "same_path",
    "sweep_temporaries",
    "write_checkpoint",
]

_SECTION = re.compile(r"(?!(?:state|rank|manifest)$)[a-z][a-z0-9_]{0,63}", re.ASCII)


def write_checkpoint(
    path: str,
    *,
    sections: Mapping[str, Sequence[Piece]],
    state: Any,
    rank_state: Any,
    header: Mapping[str, Any],
    ranks: Ranks,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint; when this returns, on any rank, it is durable. Collective: call on every rank.

    Args:
        path: the directory or URL to write, which must not exist unless `overwrite` is given.
        sections: this rank's pieces by section (model, optimizer, ...).
        state: plain data of the whole run; rank 0's is stored.
        rank_state: plain data of this rank; None stores nothing.
        header: plain JSON for the manifest, with at least `step` and `epoch`; rank 0's is stored.
        ranks: those that write it.
        overwrite: replace a whole checkpoint at the path, once the new one is committed under another name.

    Raises:
        CheckpointError: on every rank with the same text; earlier checkpoints are unchanged.
    """
    write_contents(
        path,
        gather=partial(collect, sections, state, rank_state, ranks.rank, ranks.world_size),
        header=header,
        ranks=ranks,
        overwrite=overwrite,
    )


class Contents(NamedTuple):
    """What one rank writes: its pieces by section, and encoded plain data with its tensors by file name."""

    sections: dict[str, list[Piece]]
    plain: dict[str, tuple[Any, list[Piece]]]


def collect(
    sections: Mapping[str, Sequence[Piece]], state: Any, rank_state: Any, rank: int, world_size: int
) -> Contents:
    """Return this rank's part of a checkpoint; see `write_checkpoint` for the arguments. Its tensors are not copied.

    Raises:
        CheckpointError: a section's name or a value in the state is not accepted.
    """
    for name in sections:
        if not _SECTION.fullmatch(name):
            raise CheckpointError(f"the section name {name!r} is not accepted: small letters, digits and _ are.")
    states = {"state": state} if rank == 0 else {}
    if rank_state is not None:
        states[rank_section(rank)] = rank_state
    plain = {name: encode_state(value, name) for name, value in states.items()}
    return Contents({name: assign_writers(pieces, rank, world_size) for name, pieces in sections.items()}, plain)


def encode_state(value: Any, name: str) -> tuple[Any, list[Piece]]:
    """Return a state as plain data, and the tensors in it.

    Raises:
        CheckpointError: a checkpoint cannot store a value or tensor in it; the message says where it is.
    """
    encoded, tensors = encode_stored(value, name)
    for key, tensor in tensors.items():
        check_storable(key, tensor)
    return encoded, [Piece(key, tuple(each.shape), 0, each) for key, each in tensors.items()]


def write_contents(
    path: str,
    *,
    gather: Callable[[], Contents],
    header: Mapping[str, Any],
    ranks: Ranks,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint of what `gather` returns on each rank; else as `write_checkpoint`. Collective."""
    files, target = resolve(path)
    rank = ranks.rank
    run_on_all = partial(
        ranks.run_on_all,
        call=SAVE,
        subject=f"checkpoint {path} was not written",
        describe=partial(describe, path=target),
    )
    full_header = {"world_size": ranks.world_size, **header}
    directory = run_on_all((lambda: _begin(files, target, full_header, overwrite)) if rank == 0 else None)[0]
    writer = _Writer(files, directory)

    def write_own() -> dict[str, Any]:
        contents = gather()
        for name, pieces in contents.sections.items():
            writer.write_shard(name, f"{name}-{rank:05d}", pieces)
        for name, (value, tensors) in contents.plain.items():
            writer.write_plain(name, value, tensors)
        return writer.table()

    try:
        tables = run_on_all(write_own, reads=rank == 0)
        run_on_all((lambda: _commit(files, directory, target, full_header, tables, overwrite)) if rank == 0 else None)
    except Exception as error:
        if files.has_rename:
            if rank == 0:
                _discard(files, directory)
        elif isinstance(error, CheckpointError):  # else rank 0 may have committed
            writer.discard()
        raise


class _Writer:
    """The files that this rank writes, and what they hold."""

    def __init__(self, files: Files, directory: str) -> None:
        self._files = files
        self._directory = directory
        self._created: list[str] = []
        self._records: dict[str, FileRecord] = {}
        self._sections: dict[str, dict[str, TensorEntry]] = {}

    def write_shard(self, section: str, stem: str, pieces: Sequence[Piece]) -> None:
        """Write the pieces as one file, if there are any."""
        if pieces:
            name = f"{stem}.safetensors"
            self._sections[section] = self._write(name, lambda out: write_shard(out, name, pieces))

    def write_plain(self, name: str, value: Any, tensors: Sequence[Piece]) -> None:
        """Write encoded plain data, and its tensors in a second file."""
        data = dump_json(value, f"{name}.json")
        self._write(f"{name}.json", lambda out: out.write(data))
        self.write_shard(name, name, tensors)

    def table(self) -> dict[str, Any]:
        """Return the manifest's entries for the written files."""
        return {
            "files": {name: [record.size, record.sha256] for name, record in self._records.items()},
            "sections": {name: table_to_json(table) for name, table in self._sections.items()},
        }

    def discard(self) -> None:
        """Remove this rank's files, as far as possible."""
        for name in self._created:
            with contextlib.suppress(Exception):
                self._files.remove_file(f"{self._directory}/{name}")

    def _write(self, name: str, write: Callable[[HashingStream], Any]) -> Any:
        path = f"{self._directory}/{name}"
        self._created.append(name)
        try:
            with self._files.create(path) as stream:
                out = HashingStream(stream)
                result = write(out)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{name}: the directory that rank 0 created does not exist here ({error}). "
                "Write to a file system that all ranks share."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path}: {describe(error, path)}. Earlier checkpoints are unchanged.") from error
        self._records[name] = out.record()
        return result


def _begin(files: Files, target: str, header: Mapping[str, Any], overwrite: bool) -> str:
    """Check the target, create the directory to write into and return it."""
    for field in ("step", "epoch", "world_size"):
        if type(header.get(field)) is not int or header[field] < 0:
            raise CheckpointError(f"the header's {field} is {header.get(field)!r}; accepted is a whole number from 0.")
    dump_json(dict(header), "the header")
    if files.exists(target if files.has_rename else f"{target}/{MANIFEST_NAME}"):
        if not overwrite:
            raise CheckpointError(
                f"{target} exists already; a checkpoint is only overwritten with overwrite=True. Pass that, remove it, or "
                "choose another name."
            )
        refuse_irreplaceable(files, target)
    if not files.has_rename:
        files.make_directories(target)
        return target
    directory = temporary_path(target)
    files.make_directories(os.path.dirname(directory))
    files.make_new_directory(directory)
    return directory


def _commit(
    files: Files, directory: str, target: str, header: Mapping[str, Any], tables: Sequence[Any], overwrite: bool
) -> None:
    """Write the manifest and rename the directory to its target."""
    records = {name: FileRecord(*record) for table in tables for name, record in table["files"].items()}
    names = sorted({name for table in tables for name in table["sections"]})
    parts = [{name: table_from_json(part) for name, part in table["sections"].items()} for table in tables]
    merged = {name: merge(part[name] for part in parts if name in part) for name in names}
    manifest = Manifest(dict(header), records, merged)
    check_tensors(manifest)
    listed = files.listing(directory)
    for name, record in records.items():
        if listed.get(name) != record.size:
            raise CheckpointError(
                f"{name} was written with {record.size} bytes and rank 0 finds {listed.get(name, 'no file')}. "
                "Write to a file system that all ranks share."
            )
    data = render(manifest)
    if not files.has_rename:
        try:
            files.put(f"{target}/{MANIFEST_NAME}", data)
        except Exception:
            with contextlib.suppress(Exception):
                files.remove_file(f"{target}/{MANIFEST_NAME}")  # it may have arrived despite the error
            raise
        return
    files.put(f"{directory}/{MANIFEST_NAME}", data)
    files.sync_directory(directory)
    free = versioned_path(files, target) if overwrite and files.exists(target) else target
    files.rename(directory, free)
    try:
        files.sync_directory(os.path.dirname(target))
    except Exception:
        with contextlib.suppress(OSError):
            files.rename(free, directory)  # undone, since it may not be durable
        raise
    if free != target:
        replace_checkpoint(free, target)


def _discard(files: Files, directory: str) -> None:
    with contextlib.suppress(OSError):
        files.remove_tree(directory)
