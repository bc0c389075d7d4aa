"""Model files: the weights of a raw loop's models as other libraries read them, and single objects in a file."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from trainwright.checkpoint.codec import decode, encode
from trainwright.checkpoint.filesystem import Files, describe, resolve, temporary_path
from trainwright.checkpoint.manifest import load_json
from trainwright.checkpoint.shards import check_storable, host_bytes, render_header
from trainwright.checkpoint.tensors import Piece, tied_groups
from trainwright.checkpoint.weight_files import divided, index_of
from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError, a_type_of
from trainwright.paths import absolute
from trainwright.rank_zero import rank_zero_warn
from trainwright.raw_loop.bare_models import extract_model_from_parallel
from trainwright.strategies.base import Strategy
from trainwright.tensor_names import clean_name

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors", re.ASCII)
STRUCTURE = "trainwright.structure"
"""The key in a file's metadata with the plain data that its tensors belong to."""
ORDER = "trainwright.order"
"""The key in a file's metadata with the names of a saved dict in its order; safetensors returns them in another one."""
PICKLED = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
PICKLE_STARTS = (b"\x80", b"PK\x03\x04")
"""How a pickle begins, and torch.save's archive of one."""


def state_dict_of(model: nn.Module, strategy: Strategy) -> dict[str, Any]:
    """Return a model's whole state_dict: on every rank, or if it is sharded on rank 0, and an empty one on the others.

    Collective if it is sharded. TypeError for something else than a model, RuntimeError if the ranks' gradients were mixed up.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model has the weights, but {a_type_of(model)} was given. Pass the model.")
    strategy.check_gradients()
    module = extract_model_from_parallel(model)
    from trainwright.strategies.whole_module import gather_module, is_sharded  # which imports FSDP

    whole = gather_module(module) if is_sharded(module) else module
    return {} if whole is None else {clean_name(name): value for name, value in whole.state_dict().items()}


def save_model(model: nn.Module, folder: str, limit: int, strategy: Strategy, ranks: Ranks) -> None:
    """Write a model's weights into a folder as safetensors files of at most `limit` bytes, by rank 0. Collective.

    Raises:
        CheckpointError: on every rank, if they were not written.
    """
    state = state_dict_of(model, strategy)
    files, inside = resolve(absolute(folder))
    work = partial(_write_model, state, files, inside, limit) if ranks.rank == 0 else None
    subject = f"the model was not saved in {folder}"
    ranks.run_on_all(work, "save_model", subject=subject, describe=partial(describe, path=inside))


def _write_model(state: Mapping[str, Any], files: Files, folder: str, limit: int) -> None:
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if len(tensors) < len(state):
        rank_zero_warn(
            f"save_model leaves out {', '.join(sorted(state.keys() - tensors.keys())[:5])}, since safetensors files hold "
            "tensors only; save_state stores them.",
            stacklevel=5,
        )
    groups = tied_groups([Piece(name, tuple(each.shape), 0, each.detach()) for name, each in tensors.items()])
    kept = {group[0].name: group[0].tensor for group in groups}  # of tied names the model's first, as an embedding's
    tied = {other.name: group[0].name for group in groups for other in group[1:]}
    # All before the first file is written, so that a refused one leaves the earlier files.
    for name, tensor in kept.items():
        check_storable(name, tensor)
    sizes = {name: tensor.nbytes for name, tensor in kept.items()}
    names = divided(sizes, limit)
    shards = [{name: kept[name] for name in shard} for shard in names.values()]
    files.make_directories(folder)
    earlier = {name for name in files.listing(folder) if name in (WHOLE, INDEX) or _SHARD.fullmatch(name)}
    written = _write_shards(files, [f"{folder}/{name}" for name in names], shards, tied)
    # The files that readers begin with go first, so that none ever takes a mixture of the earlier files and these.
    for name in sorted(earlier, key=lambda name: name not in (WHOLE, INDEX)):
        if f"{folder}/{name}" not in written:
            files.remove_file(f"{folder}/{name}")
    for name, path in zip(names, written, strict=True):
        _move(files, path, f"{folder}/{name}")
    # The index comes last: without it readers find no model, and so no part of one.
    if len(shards) > 1:
        with _new_file(files, f"{folder}/{INDEX}") as out:
            out.write(index_of(names, sizes))
    files.sync_directory(folder)


def _write_shards(files: Files, paths: list[str], shards: list[dict[str, Tensor]], tied: dict[str, str]) -> list[str]:
    """Write all shards or none, and return their paths: temporary ones if files can be renamed."""
    written: list[str] = []
    try:
        for path, shard in zip(paths, shards, strict=True):
            written.append(temporary_path(path) if files.has_rename else path)
            with files.create(written[-1]) as out:
                names = {other: first for other, first in tied.items() if first in shard}
                _write_tensors(out, os.path.basename(path), shard, names)
    except BaseException:
        for path in written:
            with contextlib.suppress(OSError):
                files.remove_file(path)
        raise
    return written


def _write_tensors(out: BinaryIO, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # keeps every tensor aligned
    out.write(render_header(path, [(name, each.dtype, tuple(each.shape)) for name, each in ordered], metadata))
    for _, tensor in ordered:
        out.write(host_bytes(tensor))


@contextlib.contextmanager
def _new_file(files: Files, path: str) -> Iterator[BinaryIO]:
    """Yield a file that takes its path once it is complete, in the place of an earlier one."""
    temporary = temporary_path(path) if files.has_rename else path
    try:
        with files.create(temporary) as out:
            yield out
        _move(files, temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove_file(temporary)
        raise


def _move(files: Files, source: str, target: str) -> None:
    if source != target:
        files.rename(source, target)


def save_object(obj: Any, path: str | os.PathLike[str], *, is_writer: bool) -> None:
    """Write plain data and tensors into one file, on the rank that writes. See `Accelerator.save`.

    Raises:
        TypeError: something else is in the object.
        CheckpointError: it was not written.
    """
    plain, tensors = encode(obj, "obj")
    is_flat = bool(tensors) and isinstance(obj, Mapping) and all(isinstance(each, Tensor) for each in obj.values())
    is_flat = is_flat and all(isinstance(name, str) for name in obj)
    if is_flat:
        tensors = dict(obj)
    for name, tensor in tensors.items():
        check_storable(name, tensor)
    # After the checks, so that a wrong object is refused on every rank.
    if not is_writer:
        return
    if tensors and str(path).endswith(PICKLED):
        rank_zero_warn(
            f"{path} is written as a safetensors file, which torch.load does not read; accelerator.load and safetensors do.",
            stacklevel=3,
        )
    files, inside = resolve(absolute(path))
    text = json.dumps(plain)
    try:
        files.make_directories(os.path.dirname(inside))
        with _new_file(files, inside) as out:
            if tensors:
                _write_tensors(out, inside, tensors, {ORDER: json.dumps([*obj])} if is_flat else {STRUCTURE: text})
            else:
                out.write(f"{text}\n".encode())
    except OSError as error:
        raise CheckpointError(f"{path} was not written: {describe(error, inside)}.") from error


def load_object(path: str | os.PathLike[str]) -> Any:
    """Return the data of `save_object`, or the tensors of any safetensors file.

    Raises:
        CheckpointError: the file is missing or damaged, or is another kind of file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    files, inside = resolve(absolute(path))
    try:
        with files.open(inside) as stream:
            data = stream.read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    length = int.from_bytes(data[:8], "little")
    # A safetensors file begins with its header's length in 8 bytes, then JSON. `save` writes other files as plain JSON.
    if data[8:9] != b"{" or length > len(data) - 8:
        if data.startswith(PICKLE_STARTS):
            raise CheckpointError(f"{path} is not valid JSON but a pickle, as torch.save writes. Use torch.load.")
        return decode(load_json(data, str(path)), {})
    try:
        tensors: dict[str, torch.Tensor] = load(data)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}). Use a good copy of it.") from error
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    if STRUCTURE in metadata:
        return decode(load_json(metadata[STRUCTURE].encode(), str(path)), tensors)
    return {name: tensors[name] for name in json.loads(metadata.get(ORDER, "null")) or header}
