"""Conversion of checkpoints to other libraries' files, and of their files to checkpoints."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from trainwright.checkpoint.filesystem import LocalFiles, describe, note_new, temporary_path
from trainwright.checkpoint.foreign_formats import Weights, read_weights
from trainwright.checkpoint.library_models import LIBRARY_MODELS, choose
from trainwright.checkpoint.reader import StoredCheckpoint, open_checkpoint
from trainwright.checkpoint.shards import METADATA_KEY, host_bytes, render_header
from trainwright.checkpoint.store import write_checkpoint
from trainwright.checkpoint.tensors import DTYPES, Piece, StoredPiece, TensorEntry
from trainwright.checkpoint.weight_folders import (
    CHUNK_ELEMENTS,
    ExportSettings,
    Recipe,
    free_target,
    new_folder,
    refuse_existing,
    write_folder,
)
from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError
from trainwright.tensor_names import is_extra_state

__all__ = ["export_folder", "export_safetensors", "import_checkpoint"]


TOKENIZER_FILES = (*("*token*.json", "vocab*", "merges.txt", "*.model", "chat_template*", "*processor_config.json"),)


class Exported(NamedTuple):
    """The tensors that an export wrote and skipped."""

    names: list[str]
    shared: dict[str, str]
    """Other names of tensors in the file, with the stored names."""
    skipped: list[str]
    """Names without the requested prefix."""
    extra_states: list[str]
    """Keys of the modules' extra states (`get_extra_state`), which the file cannot store."""


def export_safetensors(
    path: str,
    out: str,
    *,
    section: str = "model",
    strip_prefix: str = "",
    prefix: str = "",
    dtype: torch.dtype | None = None,
) -> Exported:
    """Write the tensors of a checkpoint's section as one safetensors file, a few MiB at a time.

    Tied tensors are stored once, under the model's first name for them, which is the embedding in a language model. The
    file's metadata lists the other names, like save_model of the safetensors library.

    Args:
        path, out: the checkpoint, which is verified first, and the file to write, on a local disk.
        strip_prefix: export only the tensors whose names begin with this, without it.
        prefix: added before every name.
        dtype: the dtype to convert floating-point tensors to.

    Raises:
        CheckpointError: the checkpoint is damaged, the file exists or cannot be written, or there is nothing to write.
    """
    place = _target(out)
    checkpoint = open_checkpoint(path)
    entries = checkpoint.tensors(section)
    described = {
        name: ((entry.pieces or name, entry.shape, entry.dtype), entry.dtype, entry.shape)
        for name, entry in entries.items()
    }

    def chunks(name: str) -> Iterator[torch.Tensor]:
        return _chunks(checkpoint, section, name, entries[name])

    exported = _write(place, path, described, chunks, strip_prefix, prefix, dtype)
    state = checkpoint.run_state() if section == "model" else {}
    return exported._replace(extra_states=[name for states in state.get("extra", {}).values() for name in states])


def export_folder(
    path: str, out: str, settings: ExportSettings, *, section: str = "model", tokenizer: str | None = None
) -> int:
    """Write a checkpoint's weights as a folder, like Trainer.export, and return the number of tensors.

    Args:
        tokenizer: a folder whose tokenizer files are copied.

    Raises:
        CheckpointError: the checkpoint is damaged, the folder exists or cannot be written, or there is nothing to write.
        ValueError: the checkpoint does not have one such model of transformers.
    """
    free_target(out)
    if tokenizer and not any(chain.from_iterable(map(Path(tokenizer).glob, TOKENIZER_FILES))):
        raise ValueError(f"{tokenizer} has no files of a tokenizer. Pass a folder of its save_pretrained.")
    checkpoint = open_checkpoint(path)
    stored = checkpoint.tensors(section)
    first: dict[Hashable, str] = {}
    kept = {name: first.setdefault(entry.pieces or name, name) for name, entry in stored.items()}
    recipe = Recipe(dropped={name: other for name, other in kept.items() if other != name})
    if settings.format == "huggingface":
        recipes = checkpoint.run_state().get(LIBRARY_MODELS)
        if recipes is None:
            raise CheckpointError(
                f"{path} does not describe a model of transformers (one of peft is not described). Pass --format safetensors, "
                "or call trainer.export in the run."
            )
        recipe = Recipe(**choose(recipes, settings.model, path)[1])
    names = recipe.chosen(stored)
    entries = {
        name: TensorEntry(stored[own].shape, stored[own].dtype, (StoredPiece("", "", 0, stored[own].numel),))
        for name, own in names.items()
    }

    def chunks(name: str) -> Iterator[torch.Tensor]:
        return _chunks(checkpoint, section, names[name], stored[names[name]])

    def finish(folder: str) -> None:
        for file in chain.from_iterable(map(Path(tokenizer).glob, TOKENIZER_FILES)) if tokenizer else ():
            shutil.copyfile(file, f"{folder}/{file.name}")

    ranks = Ranks()
    new_folder(out, lambda folder: write_folder(folder, recipe, entries, chunks, settings, ranks, finish), ranks)
    return len(names)


def export_tensors(
    state: Mapping[str, Any], out: str, *, strip_prefix: str = "", prefix: str = "", dtype: torch.dtype | None = None
) -> None:
    """Write the tensors of a state_dict in the same format as `export_safetensors`."""
    tensors = {name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)}
    described = {}
    for name, tensor in tensors.items():
        # Empty tensors all have the address 0, and are not tied.
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        described[name] = (memory if tensor.numel() else name, tensor.dtype, tuple(tensor.shape))
    _write(_target(out), "the state_dict", described, lambda name: iter([tensors[name]]), strip_prefix, prefix, dtype)


def _write(
    place: tuple[LocalFiles, str],
    origin: str,
    described: Mapping[str, tuple[Hashable, torch.dtype, tuple[int, ...]]],
    chunks: Callable[[str], Iterator[torch.Tensor]],
    strip_prefix: str,
    prefix: str,
    dtype: torch.dtype | None,
) -> Exported:
    """Write the tensors with the requested prefix. `described` has their identities, equal for tied ones, dtypes and shapes."""
    taken = {name: content for name, content in described.items() if name.startswith(strip_prefix)}
    if not taken:
        some = ", ".join(list(described)[:3]) or "none"
        raise CheckpointError(
            f"{origin} has no tensor whose name begins with {strip_prefix!r}; its names are for example {some}. Pass another "
            "prefix."
        )
    first: dict[Hashable, str] = {}
    shared: dict[str, str] = {}  # a safetensors file stores a tensor under one name only
    layout: dict[str, tuple[str, torch.dtype, tuple[int, ...]]] = {}
    for name, (identity, kind, shape) in taken.items():
        new = prefix + name.removeprefix(strip_prefix)
        if identity in first:
            shared[new] = first[identity]
        else:
            first[identity] = new
            layout[new] = (name, dtype if dtype and kind.is_floating_point else kind, shape)
    if METADATA_KEY in (*layout, *shared):
        raise CheckpointError(f"a tensor is called {METADATA_KEY!r}, which safetensors reserves. Pass a --prefix.")
    ordered = sorted(layout, key=lambda new: -layout[new][1].itemsize)  # so every tensor is aligned, as in the library
    with _new_file(*place) as stream:
        stream.write(render_header(place[1], [(new, *layout[new][1:]) for new in ordered], shared))
        for new in ordered:
            name, kind, _ = layout[new]
            for chunk in chunks(name):
                stream.write(host_bytes(chunk.to(kind)))
    return Exported(list(layout), shared, sorted(described.keys() - taken.keys()), [])


def _target(out: str) -> tuple[LocalFiles, str]:
    """Return the location of an export. CheckpointError if the name is not accepted, or exists."""
    if not out.endswith(".safetensors"):
        raise CheckpointError(f"{out} does not end in .safetensors, the format of an export. Pass such a name.")
    files, target = free_target(out)
    note_new(target)
    return files, target


def _chunks(checkpoint: StoredCheckpoint, section: str, name: str, entry: TensorEntry) -> Iterator[torch.Tensor]:
    for start in range(0, entry.numel, CHUNK_ELEMENTS):
        chunk = torch.empty(min(CHUNK_ELEMENTS, entry.numel - start), dtype=entry.dtype)
        checkpoint.read_part(section, Piece(name, entry.shape, start, chunk))
        yield chunk


@contextlib.contextmanager
def _new_file(files: LocalFiles, target: str) -> Iterator[BinaryIO]:
    """Yield a file to write into. It gets its name when it is complete and synced."""
    temporary = temporary_path(target)
    try:
        files.make_directories(os.path.dirname(target))
        with files.create(temporary) as stream:
            yield stream
        # Again, because another program may have written the file meanwhile, and a rename would replace it.
        refuse_existing(files, target)
        files.rename(temporary, target)
        files.sync_directory(os.path.dirname(target))
    except OSError as error:
        raise CheckpointError(f"{target} was not written: {describe(error, temporary)}.") from error
    finally:
        with contextlib.suppress(OSError):
            files.remove_file(temporary)


def import_checkpoint(source: str, path: str) -> Weights:
    """Write a checkpoint of the weights and hyper-parameters that `read_weights` reads, and return them."""
    from trainwright import __version__

    weights = read_weights(source)
    tensors = {name: value for name, value in weights.state_dict.items() if isinstance(value, torch.Tensor)}
    odd = next((name for name, value in tensors.items() if value.dtype not in DTYPES.values()), None)
    if odd is not None:
        raise CheckpointError(f"{source}: {odd!r} is {tensors[odd].dtype}, which a checkpoint does not store.")
    if not tensors:
        raise CheckpointError(f"{source} has no tensor. Pass a file with the weights of a model.")
    extra = {name: value for name, value in weights.state_dict.items() if name not in tensors and is_extra_state(name)}
    state: dict[str, Any] = {"trainwright_version": __version__, "extra": {"0": extra}}
    for prefix in ("", "datamodule_"):
        if values := getattr(weights, f"{prefix}hyper_parameters"):
            names = (f"{prefix}hyper_parameters", f"{prefix}hparams_name")
            state |= {names[0]: values, names[1]: getattr(weights, names[1])}
    write_checkpoint(
        path,
        sections={"model": [Piece(name, tuple(value.shape), 0, value) for name, value in tensors.items()]},
        state=state,
        rank_state=None,
        header={"step": weights.global_step or 0, "epoch": weights.epoch or 0, "imported_from": weights.kind},
        ranks=Ranks(),
    )
    return weights
