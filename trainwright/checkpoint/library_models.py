"""Models of transformers and peft in a module: their tensors, names and documents for files that these libraries read.

Neither library is imported before a model of it is found: models are known by their methods.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainwright.checkpoint.shards import check_storable
from trainwright.checkpoint.tensors import Piece, StoredPiece, TensorEntry, assign_writers
from trainwright.checkpoint.weight_files import CHUNK_ELEMENTS, EXPORT, ExportSettings, Recipe, write_weights
from trainwright.distributed.ranks import Ranks
from trainwright.tensor_names import clean_name, state_entries

LIBRARY_MODELS = "library_models"
"""The key of the recipes in a checkpoint's state."""
Found = TypeVar("Found")


def library_models(module: nn.Module, path: str = "") -> Iterator[tuple[str, Any]]:
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
    """Return the path and the model of this attribute, or the only ones (ValueError)."""
    matches = [path for path in found if model is None or path == model or path.startswith(f"{model}.")]
    if len(matches) == 1:
        return matches[0], found[matches[0]]
    if not found:
        raise ValueError(
            f"{owner} has no model of transformers or peft. Choose the format 'safetensors', which writes the module's names "
            "and no config."
        )
    problem = "several models" if model is None else f"no single model {model!r}"
    raise ValueError(
        f"{owner} has {problem}: choose one of {', '.join(map(repr, found))} as the model= of trainer.export, or --model."
    )


def recipe_of(path: str, model: Any) -> Recipe:
    """Return the recipe for a model of transformers, or for any module under its own names (ValueError)."""
    documents: dict[str, Any] = {}
    if _has_config(model):
        if getattr(model, "hf_quantizer", None) is not None or getattr(model, "peft_config", None):
            raise ValueError(
                f"{type(model).__name__} is quantized or contains an adapter, and an export writes plain weights. Wrap it with "
                "peft.get_peft_model, or call save_pretrained of the model in tw.gather_module(module)."
            )
        key = "dtype" if hasattr(model.config, "dtype") else "torch_dtype"  # its value follows from the weights
        about = {"architectures": [type(model).__name__.removeprefix("FSDP")], key: None}
        try:
            documents["config.json"] = json.loads(model.config.to_json_string()) | about
        except TypeError as error:
            raise ValueError(
                f"{type(model.config).__name__} contains a value that JSON cannot store: {error}."
            ) from error
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            documents["generation_config.json"] = json.loads(model.generation_config.to_json_string())
    tied: dict[Tensor, list[str]] = {}
    for name, tensor, _ in state_entries(model):
        tied.setdefault(tensor, []).append(name)
    return recipe_from(
        tied.values(), f"{path}." if path else "", documents, getattr(model, "all_tied_weights_keys", ())
    )


def recipe_from(
    tied: Iterable[Sequence[str]],
    prefix: str = "",
    documents: Mapping[str, Any] | None = None,
    second: Iterable[str] = (),
) -> Recipe:
    """Return the recipe for groups of tied names, of which the first one that is not in `second` is stored."""
    names: dict[str, str] = {}
    shared: dict[str, str] = {}
    for group in tied:
        kept = next((name for name in group if name not in second), group[0])
        names[kept] = prefix + kept
        shared |= {name: kept for name in group if name != kept}
    return Recipe(names, shared, documents or {})


def _adapter_recipe(path: str, model: Any, pieces: Iterable[Piece]) -> Recipe:
    """Return the recipe for the active adapter of a PeftModel (ValueError if peft computes its tensors)."""
    from peft import get_peft_model_state_dict

    prefix, adapter = f"{path}." if path else "", model.active_adapter
    config, base = model.peft_config[adapter], model.get_base_model()
    below = [piece for piece in pieces if piece.name.startswith(prefix)]
    state = {piece.name.removeprefix(prefix): torch.empty(piece.shape, device="meta") for piece in below}
    places = {id(tensor): prefix + name for name, tensor in state.items()}
    try:
        chosen = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
        names = {name: places[id(tensor)] for name, tensor in chosen.items()}
    except (KeyError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"peft computes the weights of an adapter of kind {config.peft_type.value} when it saves them, so they cannot be "
            "exported in parts. Call save_pretrained of the model in tw.gather_module(module)."
        ) from error
    document = {key: [*value] if isinstance(value, set) else value for key, value in config.to_dict().items()}
    document |= {"inference_mode": True}
    document["base_model_name_or_path"] = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    if config.task_type is None:
        kind = {"base_model_class": type(base).__name__.removeprefix("FSDP"), "parent_library": type(base).__module__}
        document["auto_mapping"] = kind
    return Recipe(names, {}, {"adapter_config.json": document}, "adapter_model")


def check_model(module: nn.Module) -> None:
    """Raise ValueError if the module has no model that a save could export."""
    path, model = choose(dict(library_models(module)), None, type(module).__name__)
    if is_adapter(model):
        entries = ((name, torch.empty(tensor.shape, device="meta")) for name, tensor, _ in state_entries(module))
        _adapter_recipe(path, model, [Piece(name, tuple(tensor.shape), 0, tensor) for name, tensor in entries])
    else:
        recipe_of(path, model)


def stored_recipes(modules: Sequence[nn.Module], prefixes: Iterable[str]) -> dict[str, Any]:
    """Return the recipes of all models of transformers for a checkpoint's state, by their paths."""
    recipes: dict[str, Any] = {}
    for prefix, module in zip(prefixes, modules, strict=False):
        for path, model in library_models(module):
            with suppress(Exception):  # of a config, since a checkpoint is also useful without a recipe
                recipes |= {} if is_adapter(model) else {prefix + path: recipe_of(prefix + path, model)._asdict()}
    return {LIBRARY_MODELS: recipes} if recipes else {}


def write_pieces(
    path: str,
    module: nn.Module,
    pieces: Sequence[Piece],
    settings: ExportSettings,
    ranks: Ranks,
    owners: Sequence[object] = (),
    is_staged: bool = False,
) -> bool:
    """Write the model in a module, from the ranks' pieces. Return whether an owner had a tokenizer. Collective.

    Raises:
        ValueError: on every rank, if the module has no such model, or peft computes its weights.
        CheckpointError: on every rank. See `write_weights`.
    """
    by_name = {piece.name: piece for piece in pieces}
    place, model = "", module
    if settings.format == "huggingface":
        place, model = choose(dict(library_models(module)), settings.model, type(module).__name__)
        owners = [*module.modules(), *owners]
    recipe = partial(_adapter_recipe, pieces=pieces) if is_adapter(model) else recipe_of
    chosen = Recipe(*ranks.decide(partial(recipe, place, model), EXPORT))
    return bool(write_tensors(path, chosen, by_name, settings, ranks, partial(_add_tokenizer, owners), is_staged))


def write_tensors(
    path: str,
    recipe: Recipe,
    pieces: Mapping[str, Piece],
    settings: ExportSettings,
    ranks: Ranks,
    finish: Callable[[str], Any] = str,
    is_staged: bool = False,
) -> Any:
    """Write this rank's pieces, by their names, as `write_weights` does. Collective."""
    parts = {name: pieces[stored] for name, stored in recipe.names.items()}
    mine = {id(part) for part in assign_writers([*parts.values()], ranks.rank, ranks.world_size)}
    entries = {}
    for name, part in parts.items():
        ranges = (StoredPiece("", "", part.start, part.tensor.numel()),) if id(part) in mine else ()
        entries[name] = TensorEntry(tuple(part.shape), part.tensor.dtype, ranges)

    def chunks(name: str) -> Iterable[Tensor]:
        check_storable(name, parts[name].tensor)
        return torch.split(parts[name].tensor.detach().reshape(-1), CHUNK_ELEMENTS)

    return write_weights(path, recipe, entries, chunks, settings, ranks, finish, is_staged)


def _add_tokenizer(owners: Iterable[object], folder: str) -> bool:
    """Save the first tokenizer or processor that is an attribute of an owner. Return whether there is one."""
    for value in (value for owner in owners for value in vars(owner).values()):
        is_one = any(hasattr(type(value), name) for name in ("get_vocab", "tokenizer_class", "get_attributes"))
        if is_one and callable(getattr(value, "save_pretrained", None)):
            value.save_pretrained(folder)
            return True
    return False
