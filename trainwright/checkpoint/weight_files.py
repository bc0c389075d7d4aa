"""Files of weights for other libraries: a safetensors file, or a folder of several with an index and documents.

Every rank writes its ranges of the tensors in place, so no data crosses between ranks and no rank needs a whole copy.
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
from trainwright.checkpoint.shards import METADATA_KEY, host_bytes, render_header
from trainwright.checkpoint.tensors import TensorEntry, merge
from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError

__all__ = ["EXPORT_DTYPES", "FORMATS", "ExportSettings", "export_settings", "size_of"]

EXPORT = "an export of weights"
"""The name of this collective work in error messages."""
FORMATS = ("huggingface", "safetensors")
EXPORT_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
CHUNK_ELEMENTS = 1 << 20
SUFFIX = ".safetensors"
_UNITS = {"": 1}
for power, letter in enumerate("KMGT", 1):
    _UNITS |= {f"{letter}B": 1000**power, f"{letter}IB": 1024**power}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})", re.ASCII | re.IGNORECASE)


class ExportSettings(NamedTuple):
    """The form of an export. `limit` is the most bytes of a file, and `model` the attribute with the model."""

    format: str = "safetensors"
    dtype: torch.dtype | None = None
    limit: int = sys.maxsize
    model: str | None = None
    overwrite: bool = False


class Recipe(NamedTuple):
    """The contents of an export, as plain JSON data."""

    names: Mapping[str, str]
    """The names of the tensors in a checkpoint, by their names in the files."""
    shared: Mapping[str, str]
    """Other names of tensors, with their names in the files, which store them once."""
    documents: Mapping[str, Any] = {}
    """The JSON files beside the weights, by name."""
    stem: str = "model"


def export_settings(
    format: str,
    dtype: Any = None,
    max_shard_size: int | str = "5GB",
    model: str | None = None,
    overwrite: bool = False,
) -> ExportSettings:
    """Return checked settings (ValueError)."""
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is not accepted. Choose from {', '.join(map(repr, FORMATS))}.")
    dtype = EXPORT_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        accepted = ", ".join(map(repr, EXPORT_DTYPES))
        raise ValueError(f"dtype={dtype!r} is not accepted. Pass {accepted}, a floating-point torch.dtype or None.")
    return ExportSettings(format, dtype, size_of(max_shard_size), model, overwrite)


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
        return {stem + SUFFIX: shards[0]}
    return {f"{stem}-{number:05d}-of-{len(shards):05d}{SUFFIX}": shard for number, shard in enumerate(shards, 1)}


def index_of(files: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> bytes:
    """Return the contents of the index of several files."""
    homes = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(homes.items()))}
    return f"{json.dumps(index, indent=2)}\n".encode()


def free_target(out: str, overwrite: bool = False) -> tuple[LocalFiles, str]:
    """Return the location of an export. CheckpointError if it is not on a local disk, or exists and is not to be replaced."""
    files, target = resolve(out)
    if not isinstance(files, LocalFiles):
        raise CheckpointError(f"{out} is not on a local disk. Pass a local path, and copy the file from there.")
    if files.exists(target) and not (overwrite and _is_replaceable(target)):
        hint = (
            "is not an export, so it is not replaced" if overwrite else "no export replaces it without overwrite=True"
        )
        raise CheckpointError(f"{target} exists already, and {hint}. Remove it or choose another name.")
    return files, target


def _is_replaceable(target: str) -> bool:
    """Return whether this is a file of weights, or a folder of an export without other folders in it."""
    if not os.path.isdir(target):
        return target.endswith(SUFFIX)
    entries = list(os.scandir(target))
    names = {entry.name.removesuffix(".index.json") for entry in entries}
    return all(entry.is_file() for entry in entries) and not names.isdisjoint(
        {f"model{SUFFIX}", f"adapter_model{SUFFIX}"}
    )


def write_weights(
    path: str,
    recipe: Recipe,
    entries: Mapping[str, TensorEntry],
    chunks: Callable[[str], Iterable[Tensor]],
    settings: ExportSettings,
    ranks: Ranks,
    finish: Callable[[str], Any] = str,
    is_staged: bool = False,
) -> Any:
    """Write a folder, or a file if the path ends in .safetensors. Return rank 0's result of `finish`. Collective.

    Args:
        entries: all tensors by their names in the files. Each has the range that this rank writes, or no piece.
        chunks: returns the elements of this rank's range, in order.
        finish: adds files to the folder.
        is_staged: the folder is in a temporary one, which the caller renames or removes.

    Raises:
        CheckpointError: on every rank. There is nothing at the path.
    """
    is_first, is_file = ranks.rank == 0, path.endswith(SUFFIX)
    subject = f"{path} was not written"
    run = partial(ranks.run_on_all, call=EXPORT, subject=subject, describe=partial(describe, path=path))

    def begin() -> Any:
        if METADATA_KEY in (*recipe.names, *recipe.shared):
            raise CheckpointError(f"a tensor is called {METADATA_KEY!r}, which safetensors reserves. Pass a --prefix.")
        if is_file and recipe.documents:
            raise CheckpointError(
                f"{path} is the name of a file, but the weights need a folder. Pass a name without suffix."
            )
        table = table_to_json(entries)
        if not is_first or is_staged:
            return table, path, path
        files, target = free_target(path, settings.overwrite)
        note_new(target)
        files.make_directories(os.path.dirname(target))
        return table, temporary_path(target), target

    begun = run(begin)
    plan = _Plan(merge(table_from_json(table) for table, *_ in begun), recipe, settings, is_file)
    folder, target = begun[0][1:]

    try:
        run(partial(plan.create, folder) if is_first else None)
        result = run(lambda: plan.write(folder, entries, chunks, finish if is_first else None))[0]
        content = f"{folder}/{recipe.stem}{SUFFIX}" if is_file else folder
        run(partial(_commit, content, target, settings.overwrite) if is_first and not is_staged else None)
    finally:
        if is_first and not is_staged:  # after a success it is gone or empty, or has the replaced files
            with contextlib.suppress(OSError):
                LocalFiles().remove_tree(folder)
    return result


def _commit(content: str, target: str, overwrite: bool) -> None:
    """Rename a complete file or folder to its path. An earlier folder gets the other name."""
    files, _ = free_target(target, overwrite)  # another program may have written it meanwhile
    if not os.path.isdir(target):
        files.rename(content, target)
    elif not files.exchange(content, target):
        raise CheckpointError(f"{target} exists, and its file system cannot replace a folder. Remove it first.")
    files.sync_directory(os.path.dirname(target))


class _Plan:
    """The files of an export, equal on all ranks."""

    def __init__(
        self, table: Mapping[str, TensorEntry], recipe: Recipe, settings: ExportSettings, is_file: bool
    ) -> None:
        self._recipe, cast = recipe, settings.dtype
        self._dtypes = {
            name: cast if cast is not None and entry.dtype.is_floating_point else entry.dtype
            for name, entry in table.items()
        }
        self._sizes = {name: entry.numel * self._dtypes[name].itemsize for name, entry in table.items()}
        # A file is one file, and peft reads one only.
        limit = settings.limit if recipe.stem == "model" and not is_file else sys.maxsize
        self._shards = divided(self._sizes, limit, recipe.stem)
        self._headers: dict[str, tuple[bytes, int]] = {}
        """The header and the size of every file."""
        self._starts: dict[str, int] = {}
        """Where the data of every tensor begins in its file."""
        for file, names in self._shards.items():
            ordered = sorted(names, key=lambda name: -self._dtypes[name].itemsize)  # so every tensor is aligned
            shared = {other: name for other, name in recipe.shared.items() if name in names}
            header = render_header(file, [(name, self._dtypes[name], table[name].shape) for name in ordered], shared)
            reached = len(header)
            for name in ordered:
                self._starts[name] = reached
                reached += self._sizes[name]
            self._headers[file] = header, reached

    def create(self, folder: str) -> None:
        """Create the files, without data."""
        os.mkdir(folder)
        for file, (header, size) in self._headers.items():
            with open(f"{folder}/{file}", "xb") as stream:
                stream.write(header)
                stream.truncate(size)

    def write(
        self,
        folder: str,
        entries: Mapping[str, TensorEntry],
        chunks: Callable[[str], Iterable[Tensor]],
        finish: Callable[[str], Any] | None,
    ) -> Any:
        """Write this rank's ranges, and on the rank with `finish` the other files."""
        for file, names in self._shards.items():
            try:
                with open(f"{folder}/{file}", "r+b") as stream:
                    for name in names:
                        for piece in entries[name].pieces:
                            self._write_range(stream.fileno(), name, piece.start, chunks(name))
                    os.fsync(stream.fileno())
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"the file that rank 0 created is not here ({error}). Write to a file system that all ranks share."
                ) from error
        if finish is None:
            return None
        for name, content in self._recipe.documents.items():
            text = json.dumps(self._with_dtype(content), indent=2, sort_keys=True)
            LocalFiles().put(f"{folder}/{name}", f"{text}\n".encode())
        if len(self._shards) > 1:
            LocalFiles().put(f"{folder}/{self._recipe.stem}{SUFFIX}.index.json", index_of(self._shards, self._sizes))
        result = finish(folder)
        LocalFiles().sync_tree(folder, LocalFiles().tree(folder))
        return result

    def _write_range(self, descriptor: int, name: str, start: int, chunks: Iterable[Tensor]) -> None:
        offset = self._starts[name] + start * self._dtypes[name].itemsize
        for chunk in chunks:
            view = host_bytes(chunk.to(self._dtypes[name]))
            while view:
                count = os.pwrite(descriptor, view, offset)
                view, offset = view[count:], offset + count

    def _with_dtype(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the dtype of the weights, which the recipe has left open."""
        dtype = next((dtype for dtype in self._dtypes.values() if dtype.is_floating_point), None)
        text = str(dtype).removeprefix("torch.")
        return {key: text if key in ("dtype", "torch_dtype") and dtype else value for key, value in document.items()}
