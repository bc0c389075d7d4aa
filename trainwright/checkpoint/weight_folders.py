"""Folders of weights for other libraries: safetensors files of a limited size, their index and documents.

Every rank writes its ranges of the tensors in place, so no data crosses between ranks and no rank needs a whole copy.
`library_models.py` chooses the tensors and their names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.checkpoint.filesystem import LocalFiles, describe, note_new, resolve, temporary_path
from trainwright.checkpoint.manifest import table_from_json, table_to_json
from trainwright.checkpoint.shards import host_bytes, render_header
from trainwright.checkpoint.tensors import TensorEntry, merge
from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError

__all__ = ["EXPORT_DTYPES", "FORMATS", "export_settings"]

EXPORT = "an export of weights"
"""The name of this collective work in error messages."""
FORMATS = ("huggingface", "safetensors")
EXPORT_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
CHUNK_ELEMENTS = 1 << 20
_UNITS = {"": 1}
for power, letter in enumerate("KMGT", 1):
    _UNITS |= {f"{letter}B": 1000**power, f"{letter}IB": 1024**power}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})", re.ASCII | re.IGNORECASE)


class ExportSettings(NamedTuple):
    """The form of an exported folder."""

    format: str
    dtype: torch.dtype | None = None
    """The dtype of floating-point tensors, or None for the stored one."""
    limit: int = 5 * 1000**3
    """The most bytes of a file."""
    model: str | None = None
    """The attribute of the module with the model, or None for the only one."""


class Recipe(NamedTuple):
    """The contents of a folder, as plain JSON data."""

    prefix: str = ""
    """The beginning of the tensors' names in a checkpoint, which the files omit."""
    dropped: Mapping[str, str] = {}
    """Names below the prefix that the files omit, with the name of the same tensor, or ""."""
    documents: Mapping[str, Any] = {}
    """The JSON files beside the weights, by name."""
    size: int = 1
    """The number of tensors below the prefix in the files, or less if it is unknown."""
    names: Mapping[str, str] | None = None
    """The names in a checkpoint by the names in one file, if they do not follow from the prefix."""
    stem: str = "model"

    def chosen(self, stored: Iterable[str]) -> dict[str, str]:
        """Return the names in a checkpoint by the names in the files (CheckpointError if a tensor is missing)."""
        stored = {name: None for name in stored if self.prefix or not name.startswith(".")}  # not of a second module
        names = self.names
        if names is None:
            below = [name.removeprefix(self.prefix) for name in stored if name.startswith(self.prefix)]
            names = {name: self.prefix + name for name in below if name not in self.dropped}
        count = sum(name in stored for name in names.values())
        if count < max(self.size, len(names)):
            raise CheckpointError(
                f"{count} of {max(self.size, len(names))} tensors of {self.prefix or 'the model'} are there, because "
                "on_save_checkpoint removed the others or this section lacks them. Use the weights of the whole model."
            )
        return dict(names)


def export_settings(
    format: str, dtype: Any = None, max_shard_size: int | str = "5GB", model: str | None = None
) -> ExportSettings:
    """Return checked settings (ValueError)."""
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is not accepted. Choose from {', '.join(map(repr, FORMATS))}.")
    dtype = EXPORT_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        accepted = ", ".join(map(repr, EXPORT_DTYPES))
        raise ValueError(f"dtype={dtype!r} is not accepted. Pass {accepted}, a floating-point torch.dtype or None.")
    return ExportSettings(format, dtype, size_of(max_shard_size), model)


def size_of(text: int | str) -> int:
    """Return a size in bytes: a number, or one with a unit such as "10GB" or "512MiB" (ValueError)."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or not float(match[1]):
        raise ValueError(f"max_shard_size={text!r} is not accepted. Pass bytes, or for example '10GB' or '512MiB'.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def divided(sizes: Mapping[str, int], limit: int, stem: str = "model") -> dict[str, list[str]]:
    """Return the tensors of every file, at most `limit` bytes in their order. A larger tensor has its own file."""
    shards: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if shards[-1] and total + size > limit:
            shards.append([])
            total = 0
        shards[-1].append(name)
        total += size
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def index_of(files: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> bytes:
    """Return the contents of the index of several files."""
    homes = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(homes.items()))}
    return f"{json.dumps(index, indent=2)}\n".encode()


def free_target(out: str) -> tuple[LocalFiles, str]:
    """Return the location of an export. CheckpointError if it is not on a local disk, or exists."""
    files, target = resolve(out)
    if not isinstance(files, LocalFiles):
        raise CheckpointError(f"{out} is not on a local disk. Pass a local path, and copy the file from there.")
    refuse_existing(files, target)
    return files, target


def refuse_existing(files: LocalFiles, target: str) -> None:
    """Raise CheckpointError if there is anything at a path."""
    if files.exists(target):
        raise CheckpointError(
            f"{target} exists already, and an export never overwrites. Remove it or choose another name."
        )


def new_folder(path: str, write: Callable[[str], Any], ranks: Ranks) -> Any:
    """Call `write` with a temporary folder, and give the folder its name when it is complete. Collective.

    Raises:
        CheckpointError: on every rank. There is nothing at the path.
    """
    files = LocalFiles()
    run = partial(
        ranks.run_on_all, call=EXPORT, subject=f"{path} was not written", describe=partial(describe, path=path)
    )

    def begin() -> tuple[str, str]:
        _, target = free_target(path)
        if target.endswith(".safetensors"):
            raise CheckpointError(
                f"{path} is the name of a file, and this export is a folder. Pass a name without suffix."
            )
        note_new(target)
        files.make_directories(os.path.dirname(target))
        return temporary_path(target), target

    temporary, target = run(begin if ranks.rank == 0 else None)[0]

    def commit() -> None:
        refuse_existing(files, target)  # again, because another program may have made it meanwhile
        files.rename(temporary, target)
        files.sync_directory(os.path.dirname(target))

    try:
        result = write(temporary)
        run(commit if ranks.rank == 0 else None)
    except BaseException:
        if ranks.rank == 0:
            with contextlib.suppress(OSError):
                files.remove_tree(temporary)
        raise
    return result


def write_folder(
    folder: str,
    recipe: Recipe,
    entries: Mapping[str, TensorEntry],
    chunks: Callable[[str], Iterable[Tensor]],
    settings: ExportSettings,
    ranks: Ranks,
    finish: Callable[[str], Any] = lambda _: None,
) -> Any:
    """Write a new folder, and return rank 0's result of `finish`, which adds files to it. Collective.

    Args:
        entries: all tensors by their names in the files. Each has the range that this rank writes, or no piece.
        chunks: returns the elements of this rank's range, in order.

    Raises:
        CheckpointError: on every rank. The folder may be incomplete.
    """
    run = partial(
        ranks.run_on_all, call=EXPORT, subject="the weights were not exported", describe=partial(describe, path=folder)
    )
    table = merge(map(table_from_json, run(partial(table_to_json, entries))))
    plan = _Plan(recipe, table, settings)

    def create() -> None:
        os.mkdir(folder)
        for file, (header, size) in plan.files.items():
            with open(f"{folder}/{file}", "xb") as stream:
                stream.write(header)
                stream.truncate(size)

    def write() -> Any:
        for name, entry in entries.items():
            for piece in entry.pieces:
                plan.write(folder, name, piece.start, chunks(name))
        for file in plan.touched:
            LocalFiles().sync_directory(f"{folder}/{file}")
        if ranks.rank:
            return None
        for name, data in plan.documents().items():
            LocalFiles().put(f"{folder}/{name}", data)
        result = finish(folder)
        LocalFiles().sync_tree(folder, LocalFiles().tree(folder))
        return result

    run(create if ranks.rank == 0 else None)
    return run(write)[0]


class _Plan:
    """The files of a folder, equal on all ranks."""

    def __init__(self, recipe: Recipe, table: Mapping[str, TensorEntry], settings: ExportSettings) -> None:
        wanted = settings.dtype
        self._recipe = recipe
        self._dtypes = {
            name: wanted if wanted is not None and entry.dtype.is_floating_point else entry.dtype
            for name, entry in table.items()
        }
        self._sizes = {name: entry.numel * self._dtypes[name].itemsize for name, entry in table.items()}
        self._shards = divided(self._sizes, settings.limit if recipe.names is None else sys.maxsize, recipe.stem)
        self._starts: dict[str, tuple[str, int]] = {}
        self.files: dict[str, tuple[bytes, int]] = {}
        """The header and the size of every file."""
        self.touched: dict[str, None] = {}
        """The files that this rank has written into."""
        for file, names in self._shards.items():
            ordered = sorted(names, key=lambda name: -self._dtypes[name].itemsize)  # so every tensor is aligned
            shared = {other: name for other, name in recipe.dropped.items() if name in names}
            header = render_header(file, [(name, self._dtypes[name], table[name].shape) for name in ordered], shared)
            reached = len(header)
            for name in ordered:
                self._starts[name] = file, reached
                reached += self._sizes[name]
            self.files[file] = header, reached

    def write(self, folder: str, name: str, start: int, chunks: Iterable[Tensor]) -> None:
        """Write consecutive elements of a tensor, from the element `start` on."""
        file, begin = self._starts[name]
        dtype = self._dtypes[name]
        offset = begin + start * dtype.itemsize
        self.touched[file] = None
        try:
            descriptor = os.open(f"{folder}/{file}", os.O_WRONLY)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"the folder that rank 0 created does not exist here ({error}). Write to a file system that all ranks share."
            ) from error
        try:
            for chunk in chunks:
                view = host_bytes(chunk.to(dtype))
                while view:
                    count = os.pwrite(descriptor, view, offset)
                    view, offset = view[count:], offset + count
        finally:
            os.close(descriptor)

    def documents(self) -> dict[str, bytes]:
        """Return the contents of the small files."""
        documents = {name: dict(content) for name, content in self._recipe.documents.items()}
        floating = [dtype for dtype in self._dtypes.values() if dtype.is_floating_point]
        config = documents.get("config.json", {})
        for key in ("dtype", "torch_dtype"):
            if key in config and floating:
                config[key] = str(floating[0]).removeprefix("torch.")
        rendered = {
            name: f"{json.dumps(content, indent=2, sort_keys=True)}\n".encode() for name, content in documents.items()
        }
        if len(self._shards) > 1:
            rendered[f"{self._recipe.stem}.safetensors.index.json"] = index_of(self._shards, self._sizes)
        return rendered
