"""Reading a checkpoint. It is verified first, and no destination changes before every check has passed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, Literal, get_args

import torch

from trainwright.checkpoint.codec import decode, without_collection
from trainwright.checkpoint.discovery import listing_of, looks_ours, read_manifest
from trainwright.checkpoint.filesystem import Files, describe, digest_of, resolve
from trainwright.checkpoint.last_link import is_last_link, pointed
from trainwright.checkpoint.manifest import MANIFEST_NAME, MAX_JSON_BYTES, Manifest, load_json, rank_section
from trainwright.checkpoint.shards import FileRecord, StoredArray, copy_into, plan_copies, read_header
from trainwright.checkpoint.tensors import Piece, StoredPiece, TensorEntry
from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError, a_type_of

__all__ = ["StoredCheckpoint", "Verdict", "candidates", "examine", "open_checkpoint"]

Verify = Literal["full", "size", "off"]
# Linux lets a process open 1,024 files by default, and a checkpoint of many ranks may have more.
MAX_OPEN_FILES = 128
REMEDY = "Use another checkpoint, or a good copy of this one."


class StoredCheckpoint:
    """A verified checkpoint, made by `open_checkpoint`. `path` is the user's path, and `inside` the path in `files`."""

    def __init__(
        self, files: Files, path: str, inside: str, manifest: Manifest, verify: Verify, extra_files: Sequence[str]
    ) -> None:
        self.path = path
        self.header = manifest.header
        self.step: int = manifest.header["step"]
        self.epoch: int = manifest.header["epoch"]
        self.world_size: int = manifest.header["world_size"]
        self.num_data_ranks: int = manifest.header.get("num_data_ranks") or self.world_size
        """The number of parts of the data, fewer than the ranks if some shared a part."""
        self.extra_files = list(extra_files)
        self.sections = [name for name in manifest.sections if name != "state" and not name.startswith("rank-")]
        self.file_sizes = {name: record.size for name, record in sorted(manifest.all_files.items())}
        self._files = files
        self._inside = inside
        self._manifest = manifest
        self._verify = verify
        self._headers: dict[str, dict[str, StoredArray]] = {}

    def tensors(self, section: str) -> Mapping[str, TensorEntry]:
        """Return the tensors of a section by name."""
        if section not in self._manifest.sections:
            raise CheckpointError(
                f"{self.path} has no section {section!r}; it has {', '.join(self.sections) or 'none'}."
            )
        return self._manifest.sections[section]

    def read_into(self, section: str, pieces: Sequence[Piece]) -> None:
        """Fill the tensors of the pieces in place, and convert to their dtypes. Only overlapping bytes are read.

        Every rank reads its pieces without communication, whatever the writer's world size and strategy. Everything is
        checked before the first write.
        """
        entries = self.tensors(section)
        if missing := sorted({piece.name for piece in pieces if piece.name not in entries}):
            raise CheckpointError(
                f"{self.path} has no {section} tensor {', '.join(map(repr, missing[:5]))} ({len(missing)} in all). "
                "Build the model as it was when the checkpoint was written."
            )
        with _OpenShards(self._files, self.path, self._inside, self._manifest, self._headers) as shards:
            plans = [(piece, plan_copies(entries, piece)) for piece in pieces]
            for piece, copies in plans:
                for copy in copies:
                    shards.check(copy.source, entries[piece.name])
            # Only now, after all checks, so that a failed read changes nothing.
            for piece, copies in plans:
                copy_into(piece, entries[piece.name].dtype, copies, shards.locate)

    def check_layout(self) -> None:
        """Compare the tables in the files with the manifest, without reading tensors (CheckpointError)."""
        with _OpenShards(self._files, self.path, self._inside, self._manifest, self._headers) as shards:
            for table in self._manifest.sections.values():
                for entry in table.values():
                    for source in entry.pieces:
                        shards.check(source, entry)

    def read_tensors(self, section: str, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Return whole tensors in host memory by name, by default all tensors of the section."""
        entries = self.tensors(section)
        if absent := sorted(set(names or ()) - entries.keys()):
            raise CheckpointError(f"{self.path} has no {section} tensor {absent[0]!r}.")
        wanted = [name for name in entries if names is None or name in names]
        try:
            tensors = {name: torch.empty(entries[name].shape, dtype=entries[name].dtype) for name in wanted}
        except (RuntimeError, MemoryError) as error:  # a sparse file can claim any size
            size = sum(entries[name].numel * entries[name].dtype.itemsize for name in wanted)
            raise CheckpointError(
                f"{self.path}: its {section} tensors need {size} bytes of memory. {REMEDY}"
            ) from error
        self.read_into(section, [Piece(name, entries[name].shape, 0, tensor) for name, tensor in tensors.items()])
        return tensors

    def read_tensor(self, section: str, name: str) -> torch.Tensor:
        """Return one whole tensor in host memory."""
        return self.read_tensors(section, [name])[name]

    def run_state(self) -> dict[str, Any]:
        """Return the plain state of a run. If it is not a dict, no run wrote it (CheckpointError)."""
        state = self._read_plain("state")
        if not isinstance(state, dict):
            raise CheckpointError(
                f"{self.path}: state.json contains {a_type_of(state)}, not the dict of a run. {REMEDY}"
            )
        return state

    def rank_state(self, rank: int) -> Any | None:
        """Return the plain state that a rank stored, or None if it stored nothing or did not exist."""
        name = rank_section(rank)
        return self._read_plain(name) if f"{name}.json" in self._manifest.files else None

    def first_rank(self, data_rank: int) -> int:
        """Return the first of the ranks that had this part of the data."""
        return data_rank * (self.world_size // self.num_data_ranks)

    def _read_plain(self, section: str) -> Any:
        name = f"{section}.json"
        record = self._manifest.files.get(name)
        if record is None or record.size > MAX_JSON_BYTES:
            raise CheckpointError(f"{self.path}: {name} is missing or too large to be plain data.")
        try:
            with self._files.open(f"{self._inside}/{name}") as stream:
                data = stream.read()
        except OSError as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from error
        # These bytes may differ from the verified bytes, and "size" has hashed no file.
        if self._verify != "off" and hashlib.sha256(data).hexdigest() != record.sha256:
            raise CheckpointError(f"{self.path}: {name} does not match its digest: it is damaged. {REMEDY}")
        tensors = self.read_tensors(section) if section in self._manifest.sections else {}
        try:
            with without_collection():
                return decode(load_json(data, name), tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {name}: {error}") from error


class _OpenShards:
    """The open safetensors files of one read, at most MAX_OPEN_FILES."""

    def __init__(
        self, files: Files, path: str, inside: str, manifest: Manifest, headers: dict[str, dict[str, StoredArray]]
    ) -> None:
        self._files = files
        self._path, self._inside = path, inside
        self._manifest = manifest
        self._headers = headers
        self._opened: dict[str, BinaryIO] = {}

    def __enter__(self) -> _OpenShards:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        while self._opened:
            self._opened.popitem()[1].close()
        if isinstance(error, CheckpointError | OSError):
            raise CheckpointError(f"{self._path}: {error}") from error

    def header(self, file: str) -> dict[str, StoredArray]:
        """Return a file's table. Its header is read and checked once."""
        if file not in self._headers:
            self._headers[file] = read_header(self._open(file), file, self._manifest.files[file].size)
        return self._headers[file]

    def check(self, source: StoredPiece, entry: TensorEntry) -> None:
        """Reject a piece that its file does not contain as the manifest says (CheckpointError)."""
        array = self.header(source.file).get(source.key)
        if array is None:
            raise CheckpointError(f"{source.file} has no {source.key!r}, though {MANIFEST_NAME} lists a tensor there.")
        if (array.dtype, array.numel) != (entry.dtype, source.numel):
            raise CheckpointError(
                f"{source.file} has {array.numel} elements of {array.dtype} as {source.key!r}, but {MANIFEST_NAME} lists "
                f"{source.numel} elements of {entry.dtype}."
            )

    def locate(self, file: str, key: str) -> tuple[BinaryIO, StoredArray]:
        """Return the open file, and the location of the key's bytes."""
        return self._open(file), self.header(file)[key]

    def _open(self, file: str) -> BinaryIO:
        if file not in self._opened:
            if len(self._opened) >= MAX_OPEN_FILES:
                self._opened.pop(next(iter(self._opened))).close()
            self._opened[file] = self._files.open(f"{self._inside}/{file}")
        return self._opened[file]


def check_verify(verify: str) -> None:
    """Reject an unknown degree of verification (ValueError)."""
    if verify not in get_args(Verify):
        raise ValueError(
            f"verify={verify!r} is unknown; choose from {', '.join(get_args(Verify))}. The default, full, compares the "
            "digest of every file."
        )


def open_checkpoint(path: str, verify: Verify = "full", *, ranks: Ranks | None = None) -> StoredCheckpoint:
    """Verify a checkpoint and return it, ready to be read.

    With `ranks` every file is hashed by one of the ranks, and all ranks raise the same error. This is collective.

    Args:
        path: the checkpoint's directory, or its URL.
        verify: "full" hashes every file, "size" compares sizes, "off" only checks that the files exist.
        ranks: the ranks that open the checkpoint, or None if only this process opens it.

    Raises:
        CheckpointError: this is not a checkpoint, or it is damaged, or its format is newer than this version reads.
    """
    check_verify(verify)
    # Rank 0 follows the link for all ranks, because a save may change it meanwhile.
    path = ranks.decide(partial(pointed, str(path)), "the opening of a checkpoint") if ranks else pointed(str(path))
    rank, world_size = (ranks.rank, ranks.world_size) if ranks else (0, 1)
    files, inside = resolve(path)
    opened: list[StoredCheckpoint] = []

    def verified() -> str:
        manifest = read_manifest(files, inside)
        try:
            listed = listing_of(files, inside, manifest)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if fault := next(faults(files, inside, manifest, listed, verify, rank, world_size), None):
            raise CheckpointError(f"{path}: {fault}. {REMEDY}")
        extra = sorted(listed.keys() - manifest.own_names)
        opened.append(StoredCheckpoint(files, str(path), inside, manifest, verify, extra))
        return hashlib.sha256(repr(sorted(manifest.all_files.items())).encode()).hexdigest()

    if ranks is None:
        verified()
        return opened[0]
    seen = ranks.run_on_all(verified, "the opening of a checkpoint", describe=partial(describe, path=inside))
    # A folder that is not shared may contain other checkpoints of the same name on other machines.
    if len(set(seen)) > 1:
        raise CheckpointError(f"the ranks see different checkpoints at {path}; give a path that all of them share.")
    return opened[0]


@dataclass(frozen=True)
class Verdict:
    """The result of checking every byte of a checkpoint."""

    path: str
    problems: list[str] = field(default_factory=list)
    """One line per bad file; empty if the checkpoint is complete."""
    extra_files: list[str] = field(default_factory=list)
    """Names in the directory that do not belong to the checkpoint."""
    step: int | None = None
    """The step, or None if the manifest cannot be read."""
    num_files: int = 0
    num_bytes: int = 0


def examine(path: str) -> Verdict:
    """Read all files of a checkpoint, and return every problem, not only the first."""
    path = pointed(path)
    files, inside = resolve(path)
    try:
        manifest = read_manifest(files, inside)
    except CheckpointError as error:
        return Verdict(path, [str(error)])
    listed = listing_of(files, inside, manifest)
    problems = list(faults(files, inside, manifest, listed))
    if not problems:
        try:
            checkpoint = open_checkpoint(path, "size")
            checkpoint.check_layout()
            checkpoint.run_state()
            for rank in range(checkpoint.world_size):
                checkpoint.rank_state(rank)
        except CheckpointError as error:
            problems.append(str(error).removeprefix(f"{path}: "))
    extra = sorted(listed.keys() - manifest.own_names)
    sizes = [record.size for record in manifest.all_files.values()]
    return Verdict(path, problems, extra, int(manifest.header["step"]), len(sizes) + 1, sum(sizes))


def candidates(path: str) -> list[str]:
    """Return the path itself, or the directories in it that look like checkpoints, or nothing."""
    files, inside = resolve(path)
    try:
        listed = files.listing(inside)
    except OSError:
        return [path]
    if MANIFEST_NAME in listed:
        return [path]
    directories = sorted(name for name, size in listed.items() if size is None and not name.startswith("."))
    looking = [name for name in directories if name.endswith(".ckpt") or _has_manifest(files, f"{inside}/{name}")]
    paths = [f"{os.fspath(path).rstrip('/')}/{name}" for name in looking]
    found = [checkpoint for checkpoint in paths if not is_last_link(checkpoint)]
    return found or ([path] if looks_ours(path, listed) else [])


def _has_manifest(files: Files, path: str) -> bool:
    try:
        return MANIFEST_NAME in files.listing(path)
    except OSError:
        return False


def faults(
    files: Files,
    inside: str,
    manifest: Manifest,
    listed: Mapping[str, int | None],
    verify: Verify = "full",
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[str]:
    """Yield the faults of a checkpoint's files. If there are several ranks, each hashes a part of the files."""
    whole = {}
    for name, record in manifest.all_files.items():
        if name not in listed:
            yield f"{name} is missing"
        elif (size := listed[name]) is None:
            yield f"{name} is not a plain file (a link or a directory)"
        elif verify != "off" and size != record.size:
            yield f"{name} has {size} bytes and should have {record.size}: it is damaged"
        else:
            whole[name] = record
    for name in sorted(_assigned(whole, rank, world_size)) if verify == "full" else ():
        try:
            if digest_of(files, f"{inside}/{name}") != whole[name].sha256:
                yield f"{name} does not match its digest: it is damaged"
        except OSError as error:
            yield f"{name} cannot be read: {error}"


def _assigned(records: Mapping[str, FileRecord], rank: int, world_size: int) -> list[str]:
    loads, mine = [0] * world_size, []
    # Every rank computes all parts in the same order, so the ranks need not communicate.
    for name in sorted(records, key=lambda name: (-records[name].size, name)):
        chosen = loads.index(min(loads))
        loads[chosen] += records[name].size + 1
        if chosen == rank:
            mine.append(name)
    return mine
