"""Models of transformers and peft in a module: their tensors, names and documents for a folder that these libraries read.

Neither library is imported: their models are known by their methods.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainwright.checkpoint.shards import check_storable
from trainwright.checkpoint.tensors import Piece, StoredPiece, TensorEntry, assign_writers
from trainwright.checkpoint.weight_folders import CHUNK_ELEMENTS, EXPORT, ExportSettings, Recipe, write_folder
from trainwright.distributed.ranks import Ranks
from trainwright.tensor_names import clean_name, state_entries

LIBRARY_MODELS = "library_models"
"""The key of the recipes in a checkpoint's state."""
Found = TypeVar("Found")


def library_models(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost models of transformers and peft by their clean paths."""
    # By their classes, because a wrapper such as torch.compile's shows the attributes of the wrapped model.
    if callable(getattr(type(module), "save_pretrained", None)) and (is_adapter(module) or _has_config(module)):
        yield clean_name(path), module
        return
    for name, child in module.named_children():
        yield from library_models(child, f"{path}.{name}" if path else name)


def is_adapter(model: nn.Module) -> bool:
    """Return whether a model is a PeftModel."""
    return hasattr(type(model), "get_base_model") and isinstance(getattr(model, "peft_config", None), dict)


def _has_config(module: nn.Module) -> bool:
    return callable(getattr(getattr(module, "config", None), "to_json_string", None))


def choose(found: Mapping[str, Found], model: str | None, owner: str) -> tuple[str, Found]:
    """Return the model of this attribute, or the only one (ValueError)."""
    matches = {p: each for p, each in found.items() if model is None or p == model or p.startswith(f"{model}.")}
    if len(matches) == 1:
        return next(iter(matches.items()))
    if not found:
        raise ValueError(
            f"{owner} has no model of transformers or peft. Use the format 'safetensors', which writes the module's own names "
            "and no config."
        )
    raise ValueError(
        f"{owner} has {'several models' if model is None else f'no single model {model!r}'}: choose one of "
        f"{', '.join(map(repr, found))} as the model."
    )


def recipe_of(path: str, model: nn.Module) -> Recipe:
    """Return the recipe for a model of transformers, or for any module under its own names (ValueError)."""
    prefix, documents = f"{path}." if path else "", {}
    ignored: Iterable[str] = ()
    if _has_config(model):
        config: Any = copy.deepcopy(model.config)
        if getattr(model, "hf_quantizer", None) is not None or getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError(
                f"{type(model).__name__} is quantized or contains an adapter, and an export writes plain weights. Wrap it with "
                "peft.get_peft_model, or call save_pretrained of tw.gather_module(module)."
            )
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        documents["config.json"] = json.loads(config.to_json_string())
        documents["config.json"]["dtype" if hasattr(config, "dtype") else "torch_dtype"] = None  # set when it is known
        if getattr(model, "generation_config", None) is not None and model.can_generate():  # type: ignore[operator]
            documents["generation_config.json"] = json.loads(model.generation_config.to_json_string())  # type: ignore[union-attr, operator]
        ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    names: dict[Tensor, list[str]] = {}
    for name, tensor, _ in state_entries(model):
        if name not in ignored:
            names.setdefault(tensor, []).append(name)
    second = getattr(model, "all_tied_weights_keys", None) or ()
    dropped = dict.fromkeys(ignored, "")
    for group in names.values():
        kept = next((name for name in group if name not in second), group[0])
        dropped |= {name: kept for name in group if name != kept}
    return Recipe(prefix, dropped, documents, len(names))


def _adapter_recipe(path: str, model: Any, pieces: Iterable[Piece]) -> Recipe:
    """Return the recipe for the active adapter of a PeftModel (ValueError if peft computes its tensors)."""
    from peft import get_peft_model_state_dict

    prefix = f"{path}." if path else ""
    tensors = {
        p.name: torch.empty(p.shape, dtype=p.tensor.dtype, device="meta") for p in pieces if p.name.startswith(prefix)
    }
    names = {id(tensor): name for name, tensor in tensors.items()}
    state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    adapter = model.active_adapter
    kind = str(getattr(model.peft_config[adapter].peft_type, "value", ""))
    try:
        chosen = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
        return Recipe(prefix, names={name: names[id(tensor)] for name, tensor in chosen.items()}, stem="adapter_model")
    except (KeyError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"peft computes the weights of an adapter of kind {kind} when it saves them, so they cannot be exported in parts. "
            "Call save_pretrained of the model in tw.gather_module(module)."
        ) from error


def stored_recipes(modules: Sequence[nn.Module], prefixes: Sequence[str]) -> dict[str, Any]:
    """Return the recipes of all models of transformers for a checkpoint's state, by their paths."""
    recipes: dict[str, Any] = {}
    for prefix, module in zip(prefixes, modules, strict=True):
        for path, model in library_models(module):
            with suppress(Exception):  # of a config, since a checkpoint is also useful without a recipe
                recipes |= {} if is_adapter(model) else {prefix + path: recipe_of(prefix + path, model)._asdict()}
    return {LIBRARY_MODELS: recipes} if recipes else {}


def write_pieces(
    folder: str,
    module: nn.Module,
    pieces: Sequence[Piece],
    settings: ExportSettings,
    ranks: Ranks,
    owners: Sequence[object] = (),
) -> bool:
    """Write the model in a module as a new folder, from the ranks' pieces. Return whether an owner had a tokenizer. Collective.

    Raises:
        ValueError: on every rank, if the module has no such model, or peft computes its weights.
        CheckpointError: on every rank.
    """
    by_name = {piece.name: piece for piece in pieces}
    path, model = "", module
    if settings.format == "huggingface":
        path, model = choose(dict(library_models(module)), settings.model, type(module).__name__)
    make = partial(_adapter_recipe, path, model, pieces) if is_adapter(model) else partial(recipe_of, path, model)
    recipe = Recipe(*ranks.decide(make, EXPORT))
    names = recipe.chosen(by_name)
    mine = {
        each.name for each in assign_writers([by_name[name] for name in names.values()], ranks.rank, ranks.world_size)
    }
    entries = {}
    for name, stored in names.items():
        tensor = by_name[stored].tensor
        part = StoredPiece("", "", by_name[stored].start, tensor.numel())
        entries[name] = TensorEntry(tuple(by_name[stored].shape), tensor.dtype, (part,) if stored in mine else ())

    def chunks(name: str) -> Iterable[Tensor]:
        check_storable(name, by_name[names[name]].tensor)
        return torch.split(by_name[names[name]].tensor.detach().reshape(-1), CHUNK_ELEMENTS)

    holders = [*module.modules(), *owners] if settings.format == "huggingface" else []
    finish = partial(_add_files, model if is_adapter(model) else None, holders)
    return bool(write_folder(folder, recipe, entries, chunks, settings, ranks, finish))


def _add_files(adapter: Any, holders: Iterable[object], folder: str) -> bool:
    """Save the adapter's config and a holder's tokenizer in the folder. Return whether there is a tokenizer."""
    if adapter is not None:
        config = copy.copy(adapter.peft_config[adapter.active_adapter])
        base = adapter.get_base_model()
        config.inference_mode = True
        config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
        kind = {"base_model_class": type(base).__name__.removeprefix("FSDP"), "parent_library": type(base).__module__}
        config.save_pretrained(folder, auto_mapping_dict=kind if config.task_type is None else None)
    for holder in holders:
        for value in vars(holder).values():
            is_tokenizer = (
                hasattr(value, "get_vocab") or hasattr(value, "tokenizer") or hasattr(value, "image_processor")
            )
            if is_tokenizer and not isinstance(value, nn.Module) and callable(getattr(value, "save_pretrained", None)):
                value.save_pretrained(folder)
                return True
    return False
