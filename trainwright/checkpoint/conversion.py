"""Conversion of checkpoints to other libraries' files, and of their files to checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainwright.checkpoint.contents import collect
from trainwright.checkpoint.foreign_formats import Weights, read_weights
from trainwright.checkpoint.frozen_base import FROZEN_BASE
from trainwright.checkpoint.library_models import LIBRARY_MODELS, choose, recipe_from, write_tensors
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.checkpoint.store import write_checkpoint
from trainwright.checkpoint.tensors import DTYPES, Piece, StoredPiece, TensorEntry, tied_groups
from trainwright.checkpoint.weight_files import CHUNK_ELEMENTS, ExportSettings, Recipe, free_target, write_weights
from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError
from trainwright.tensor_names import is_extra_state

__all__ = ["export_safetensors", "import_checkpoint"]

AS_STORED = ExportSettings()
TOKENIZER_FILES = ("*token*.json", "vocab*", "merges.txt", "*.model", "chat_template*", "*processor_config.json")


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
    settings: ExportSettings = AS_STORED,
    tokenizer: str | None = None,
) -> Exported:
    """Write the tensors of a checkpoint's section as safetensors files, a few MiB at a time.

    Tied tensors are stored once, under the model's first name for them, which is the embedding in a language model. The
    file's metadata lists the other names, like save_model of the safetensors library.

    Args:
        path, out: the checkpoint, which is verified first, and a local file that ends in .safetensors, or a folder.
        strip_prefix: export only the tensors whose names begin with this, without it.
        prefix: added before every name.
        settings: the form of the export. In the format "huggingface" the names come from the checkpoint.
        tokenizer: a folder whose files of a tokenizer are copied.

    Raises:
        CheckpointError: the checkpoint is damaged, the file exists or cannot be written, or there is nothing to write.
    """
    free_target(out)
    files = [*chain.from_iterable(map(Path(tokenizer).glob, TOKENIZER_FILES))] if tokenizer else []
    if tokenizer and not files:
        raise CheckpointError(f"{tokenizer} has no files of a tokenizer. Pass a folder of its save_pretrained.")
    checkpoint = open_checkpoint(path)
    entries, state = checkpoint.tensors(section), checkpoint.run_state()
    if settings.format == "huggingface":
        recipe = _stored_recipe(path, state, settings.model, entries)
    else:
        tied: dict[Hashable, list[str]] = {}
        for name, entry in entries.items():
            tied.setdefault(entry.pieces or name, []).append(name)
        recipe = _renamed(tied.values(), path, strip_prefix, prefix)
    whole = {
        name: TensorEntry(entry.shape, entry.dtype, (StoredPiece("", "", 0, entry.numel),))
        for name, entry in ((name, entries[stored]) for name, stored in recipe.names.items())
    }

    def chunks(name: str) -> Iterator[torch.Tensor]:
        stored, entry = recipe.names[name], whole[name]
        for start in range(0, entry.numel, CHUNK_ELEMENTS):
            chunk = torch.empty(min(CHUNK_ELEMENTS, entry.numel - start), dtype=entry.dtype)
            checkpoint.read_into(section, [Piece(stored, entry.shape, start, chunk)])
            yield chunk

    def finish(folder: str) -> None:
        for file in files:
            shutil.copyfile(file, f"{folder}/{file.name}")

    write_weights(out, recipe, whole, chunks, settings, Ranks(), finish)
    taken = {*recipe.names.values(), *(name for name in entries if name.startswith(strip_prefix))}
    extra = state.get("extra", {}).values() if section == "model" else ()
    skipped, extra_states = sorted(entries.keys() - taken), [name for states in extra for name in states]
    return Exported([*recipe.names], dict(recipe.shared), skipped, extra_states)


def _stored_recipe(path: str, state: Mapping[str, Any], model: str | None, entries: Container[str]) -> Recipe:
    """Return the recipe that a run stored (CheckpointError if it stored none, or a tensor is missing)."""
    if not (recipes := state.get(LIBRARY_MODELS)):
        raise CheckpointError(
            f"{path} does not describe a model of transformers (those with an adapter of peft are not described). Pass "
            "--format safetensors, or call trainer.export in the run."
        )
    recipe = Recipe(**choose(recipes, model, path)[1])
    if missing := [name for name in recipe.names.values() if name not in entries]:
        reason = "stores only the trained parameters" if FROZEN_BASE in state else "has another section"
        raise CheckpointError(
            f"{path} {reason}: {missing[0]!r} is missing, which the model needs. Call trainer.export in the run, or pass "
            "--format safetensors for the tensors that are there."
        )
    return recipe


def _renamed(tied: Iterable[Sequence[str]], origin: str, strip_prefix: str, prefix: str) -> Recipe:
    groups = [[name.removeprefix(strip_prefix) for name in names if name.startswith(strip_prefix)] for names in tied]
    recipe = recipe_from(filter(None, groups), strip_prefix)
    if not recipe.names:
        some = ", ".join([names[0] for names in tied][:3]) or "none"
        raise CheckpointError(
            f"{origin} has no tensor whose name begins with {strip_prefix!r}; its names are for example {some}. Pass another "
            "prefix."
        )
    names = {prefix + name: stored for name, stored in recipe.names.items()}
    return Recipe(names, {prefix + name: prefix + kept for name, kept in recipe.shared.items()})


def export_tensors(
    state: Mapping[str, Any], out: str, *, strip_prefix: str = "", dtype: torch.dtype | None = None
) -> None:
    """Write the tensors of a state_dict in the same format as `export_safetensors`."""
    if not out.endswith(".safetensors"):
        raise CheckpointError(f"{out} does not end in .safetensors, the format of an export. Pass such a name.")
    tensors = {name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)}
    pieces = [Piece(name, tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()]
    tied = [[piece.name for piece in group] for group in tied_groups(pieces)]
    recipe = _renamed(tied, "the state_dict", strip_prefix, "")
    write_tensors(out, recipe, {piece.name: piece for piece in pieces}, ExportSettings(dtype=dtype), Ranks())


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
    names = ("hyper_parameters", "hparams_name", "hyper_parameter_forms")
    for name in (FROZEN_BASE, *names, *(f"datamodule_{name}" for name in names)):
        state[name] = getattr(weights, name)
    pieces = [Piece(name, tuple(value.shape), 0, value) for name, value in tensors.items()]
    header = {"step": weights.global_step or 0, "epoch": weights.epoch or 0, "imported_from": weights.kind}
    write_checkpoint(path, partial(collect, {"model": pieces}, state, None, 0, 1), header, Ranks())
    return weights
