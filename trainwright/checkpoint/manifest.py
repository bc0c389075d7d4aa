"""The manifest: the file that makes a directory a checkpoint.

It is JSON with a digest of its text, the sizes and digests of all files, and the shapes, dtypes and pieces of all tensors. A
digest shows damage, not malice, so all values are also validated before use.

The first line up to the digest and the keys `format` and `format_version` never change. So every version can recognize and
reject a newer version. Readers ignore unknown keys at the top, in the header and in a tensor's entry, so writers may add
optional keys. Any other change increases FORMAT_VERSION.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import PurePosixPath
from typing import Any

from trainwright.checkpoint.codec import without_collection
from trainwright.checkpoint.shards import MAX_DIMENSIONS, FileRecord, unique_keys
from trainwright.checkpoint.tensors import DTYPE_NAMES, DTYPES, StoredPiece, TensorEntry, check_coverage
from trainwright.errors import CheckpointError

__all__ = ["FORMAT_VERSION"]

FORMAT = "trainwright-checkpoint"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
MAX_JSON_BYTES = 512 << 20
_HEAD = b'{"sha256": "%s", "manifest": '
_TAIL = b"}\n"
_HEAD_BYTES = len(_HEAD) - 2 + 64
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", re.ASCII)
"""The file names that are accepted from a manifest. They are no paths of several parts."""
_PART = re.compile(r"(?!\.)[^/\\\x00-\x1f]{1,200}")
"""A part of an attached file's path."""
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class FormatRefused(CheckpointError):
    """A valid manifest of a format that this version does not read."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint. The header is plain JSON from the writer (step, epoch, world_size and more)."""

    header: dict[str, Any]
    files: dict[str, FileRecord]
    sections: dict[str, dict[str, TensorEntry]]
    attached: dict[str, FileRecord] = field(default_factory=dict)
    """Files that hooks have written, by their paths in the directory."""

    @property
    def all_files(self) -> dict[str, FileRecord]:
        """Return all files except the manifest, also the attached files."""
        return {**self.files, **self.attached}

    @property
    def own_names(self) -> set[str]:
        """Return the names that belong to the checkpoint in its directory: files, and folders of attached files."""
        folders = {str(parent) for name in self.attached for parent in PurePosixPath(name).parents}
        return {MANIFEST_NAME, *self.files, *self.attached, *folders} - {"."}


def rank_section(rank: int) -> str:
    """Return the name under which a rank's state is stored."""
    return f"rank-{rank:05d}"


def render(manifest: Manifest) -> bytes:
    """Return the file's bytes, in which `parse` detects any flipped bit."""
    body = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "header": manifest.header,
        "files": dict(sorted(manifest.files.items())),
        "sections": {name: table_to_json(table) for name, table in sorted(manifest.sections.items())},
    }
    if manifest.attached:
        body["attached"] = dict(sorted(manifest.attached.items()))
    text = dump_json(body, MANIFEST_NAME)
    return _HEAD % hashlib.sha256(text).hexdigest().encode() + text + _TAIL


def dump_json(value: Any, name: str) -> bytes:
    """Return compact JSON, or raise CheckpointError if it would be too long to be read back."""
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    # A reader compares the limit with the whole file, including the manifest's digest and head.
    if len(data) > MAX_JSON_BYTES - 256:
        raise CheckpointError(
            f"{name} would take {len(data) >> 20} MiB. Store large values as tensors or numpy arrays."
        )
    return data


@without_collection()
def load_json(data: bytes, name: str) -> Any:
    """Return the content of a JSON file. CheckpointError if it is damaged or nested too deeply."""
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{name} is not valid JSON ({type(error).__name__}: {error}); the file is damaged."
        ) from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def table_to_json(table: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return the tensors of a section as JSON-able data."""
    return {
        name: {"shape": list(entry.shape), "dtype": DTYPE_NAMES[entry.dtype], "pieces": entry.pieces}
        for name, entry in table.items()
    }


def table_from_json(table: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """Return the tensors of a section. Malformed data raises built-in exceptions."""
    entries = {}
    for name, item in table.items():
        shape = item["shape"]
        is_valid = type(shape) is list and len(shape) <= MAX_DIMENSIONS and _are_counts(shape)
        # The strides of an empty tensor are the products of its other dimensions, so these must fit too.
        if not is_valid or not _are_counts([math.prod(filter(None, shape))]):
            raise _malformed(name, "shape", shape)
        pieces = tuple(starmap(StoredPiece, item["pieces"]))
        for piece in pieces:
            is_valid = isinstance(piece.file, str) and isinstance(piece.key, str)
            if not is_valid or not _are_counts(piece[2:]):
                raise _malformed(name, "piece", piece)
        entries[name] = TensorEntry(tuple(shape), DTYPES[item["dtype"]], pieces)
    return entries


def parse(data: bytes) -> Manifest:
    """Return the manifest from a file's bytes. CheckpointError if it is damaged, inconsistent or of an unknown format."""
    # The digest is compared before the bytes are parsed, so that damaged JSON is never interpreted.
    digest = data[_HEAD.index(b"%s") :][:64]
    body = data[_HEAD_BYTES : -len(_TAIL)]
    if data != _HEAD % digest + body + _TAIL or hashlib.sha256(body).hexdigest().encode() != digest:
        raise CheckpointError(
            f"{MANIFEST_NAME} does not match its own digest: it is damaged, or was not written by trainwright."
        )
    content = load_json(body, MANIFEST_NAME)
    try:
        # First, because in a newer version the rest may have another meaning.
        _check_format(content)
        header = content["header"]
        for field in ("step", "epoch", "world_size", *({"num_data_ranks"} & header.keys())):
            if not _are_counts([header[field]]):
                raise _malformed("header", field, header[field])
        files = {name: _parse_record(name, record) for name, record in content["files"].items()}
        sections = {name: table_from_json(table) for name, table in content["sections"].items()}
        attached = {name: _parse_record(name, record, True) for name, record in content.get("attached", {}).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST_NAME} is malformed: {type(error).__name__}: {error}") from error
    manifest = Manifest(header, files, sections, attached)
    check_tensors(manifest)
    for table in sections.values():
        for name, entry in table.items():
            check_coverage(name, entry)
    return manifest


def _check_format(content: Mapping[str, Any]) -> None:
    if content["format"] != FORMAT:
        raise FormatRefused(f"{MANIFEST_NAME} has format {content['format']!r}; this version reads {FORMAT!r}.")
    version = content["format_version"]
    if not _are_counts([version]):
        raise _malformed("manifest", "format_version", version)
    if version != FORMAT_VERSION:
        raise FormatRefused(
            f"{MANIFEST_NAME} has format version {version}; this trainwright reads version {FORMAT_VERSION}. "
            f"Install a trainwright that reads version {version}."
        )


def is_attachable(name: str) -> bool:
    """Return whether hooks may write a file at this path in the directory."""
    return name != MANIFEST_NAME and all(_PART.fullmatch(part) for part in name.split("/"))


def _parse_record(name: str, record: Any, is_attached: bool = False) -> FileRecord:
    if not (is_attachable(name) if is_attached else FILE_NAME.fullmatch(name) and name != MANIFEST_NAME):
        raise CheckpointError(
            f"{MANIFEST_NAME} names the file {name[:200]!r}; expected plain file names inside the directory. "
            "Do not use this checkpoint, because trainwright did not write it."
        )
    size, digest = record
    if not _are_counts([size]):
        raise _malformed(name, "size", size)
    if not isinstance(digest, str) or _SHA256.fullmatch(digest) is None:
        raise _malformed(name, "digest", digest)
    return FileRecord(size, digest)


def check_tensors(manifest: Manifest) -> None:
    """Check that every tensor lies in listed files that are large enough to hold it."""
    total = sum(record.size for record in manifest.files.values())
    for table in manifest.sections.values():
        for name, entry in table.items():
            for piece in entry.pieces:
                record = manifest.files.get(piece.file)
                if record is None:
                    raise CheckpointError(
                        f"tensor {name!r} lies in {piece.file[:200]!r}, which {MANIFEST_NAME} does not list."
                    )
                if piece.numel * entry.dtype.itemsize > record.size:
                    raise CheckpointError(f"tensor {name!r} claims {piece.numel} elements of the smaller {piece.file}.")
            # A reader allocates a whole tensor before it reads. A wrong shape must not claim all memory.
            if math.prod(entry.shape) * entry.dtype.itemsize > total:
                raise CheckpointError(f"tensor {name!r} claims shape {entry.shape}, which is larger than all files.")


def _are_counts(values: Sequence[Any]) -> bool:
    # By exact type, because for isinstance JSON's true is an int.
    return {*map(type, values)} <= {int} and min(values, default=0) >= 0 and max(values, default=0) < 1 << 62


def _malformed(name: str, key: str, value: Any) -> ValueError:
    return ValueError(f"{name[:200]!r} has {key} {str(value)[:200]!r}")
