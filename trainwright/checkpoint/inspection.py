"""What a checkpoint holds and what is wrong with it, for the command line; a run that loads one uses reader.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainwright.checkpoint.codec import encode
from trainwright.checkpoint.discovery import read_manifest
from trainwright.checkpoint.filesystem import Files, resolve
from trainwright.checkpoint.manifest import FORMAT_VERSION, MANIFEST_NAME
from trainwright.checkpoint.reader import Checkpoint, digest_fault, open_checkpoint, size_fault
from trainwright.checkpoint.tensors import DTYPE_NAMES, TensorEntry
from trainwright.errors import CheckpointError


@dataclass(frozen=True)
class Verdict:
    """The result of checking every byte of a checkpoint.

    Args:
        path: the checkpoint.
        problems: one line for each bad file; empty if the checkpoint is whole.
        extra_files: names in the directory that are not the checkpoint's.
        step: its step; None if its manifest cannot be read.
        num_files: the number of its files.
        num_bytes: their total size.
    """

    path: str
    problems: list[str] = field(default_factory=list)
    extra_files: list[str] = field(default_factory=list)
    step: int | None = None
    num_files: int = 0
    num_bytes: int = 0


def examine(path: str) -> Verdict:
    """Return everything that is wrong with a checkpoint, not only the first fault.

    Each file is read whole. If all of them are intact, their tables are compared with the manifest, and the plain data is
    decoded.
    """
    files, inside = resolve(path)
    try:
        manifest = read_manifest(files, inside)
    except CheckpointError as error:
        return Verdict(path, [str(error)])
    listed = files.listing(inside)
    problems = []
    for name, record in manifest.files.items():
        fault = size_fault(record, name, listed)
        if fault is None:
            try:
                fault = digest_fault(files, f"{inside}/{name}", record)
            except OSError as error:
                fault = f"cannot be read: {error}"
        if fault is not None:
            problems.append(f"{name} {fault}")
    if not problems:
        try:
            _read_through(open_checkpoint(path, "size"))
        except CheckpointError as error:
            problems.append(str(error).removeprefix(f"{path}: "))
    extra = sorted(listed.keys() - manifest.files.keys() - {MANIFEST_NAME})
    sizes = [record.size for record in manifest.files.values()]
    return Verdict(path, problems, extra, int(manifest.header["step"]), len(sizes) + 1, sum(sizes))


def _read_through(checkpoint: Checkpoint) -> None:
    checkpoint.check_layout()
    checkpoint.run_state()
    for rank in range(checkpoint.world_size):
        checkpoint.rank_state(rank)


def candidates(path: str) -> list[str]:
    """Return the path itself, or the directories in it that look like checkpoints by their manifest or name."""
    files, inside = resolve(path)
    try:
        listed = files.listing(inside)
    except OSError:
        return [path]
    if MANIFEST_NAME in listed:
        return [path]
    names = sorted(name for name, size in listed.items() if size is None and not name.startswith("."))
    found = [name for name in names if name.endswith(".ckpt") or _has_manifest(files, f"{inside}/{name}")]
    return [f"{os.fspath(path).rstrip('/')}/{name}" for name in found] or [path]


def _has_manifest(files: Files, path: str) -> bool:
    try:
        return MANIFEST_NAME in files.listing(path)
    except OSError:
        return False


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a checkpoint holds as JSON-able data."""
    state = checkpoint.run_state()
    about = {key: value for key, value in checkpoint.header.items() if key not in ("step", "epoch", "world_size")}
    return {
        "path": checkpoint.path,
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
        "world_size": checkpoint.world_size,
        **about,
        "trainwright_version": state.get("trainwright_version"),
        "format_version": FORMAT_VERSION,
        "sections": {name: size_of(checkpoint.tensors(name)) for name in checkpoint.sections},
        "files": checkpoint.file_sizes,
        "extra_files": checkpoint.extra_files,
        "hyper_parameters": encode(state.get("hyper_parameters") or {})[0],
        "datamodule_hyper_parameters": encode(state.get("datamodule_hyper_parameters") or {})[0],
    }


def size_of(table: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Return the size of a section; tied tensors count once."""
    distinct = {(entry.pieces or name): entry for name, entry in table.items()}
    return {
        "tensors": len(table),
        "shared": len(table) - len(distinct),
        "elements": sum(entry.numel for entry in distinct.values()),
        "bytes": sum(entry.numel * entry.dtype.itemsize for entry in distinct.values()),
    }


def list_tensors(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return the shape and dtype of every tensor by section and name."""
    return {
        section: {
            name: {"shape": list(entry.shape), "dtype": DTYPE_NAMES[entry.dtype]}
            for name, entry in checkpoint.tensors(section).items()
        }
        for section in checkpoint.sections
    }
