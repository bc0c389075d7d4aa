"""Editing: a checkpoint's contents as one dict, for hooks that add, remove or change values.

Its "state_dict" contains the model's tensors by name. At a save these are whole tensors, or this rank's shards (RankPart) if
the strategy shards them. At a load they are whole tensors in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainwright.checkpoint.frozen_base import FROZEN_BASE, Base, check_base
from trainwright.checkpoint.reader import StoredCheckpoint
from trainwright.checkpoint.shards import copy_whole
from trainwright.checkpoint.tensors import Piece, is_range, shown, stored
from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError
from trainwright.tensor_names import clean_name

RESERVED = frozenset({"seed", "extra", "precision", "strategy", "optimizers", "library_models", FROZEN_BASE})
"""Keys of the engine's state."""
Edit = Callable[[dict[str, Any]], None]
"""Changes a checkpoint's contents in place."""


def edit_for_save(
    state: Mapping[str, Any], pieces: Sequence[Piece], header: Mapping[str, int], edit: Edit
) -> tuple[dict[str, Any], Callable[[], list[Piece]]]:
    """Return the edited state, and a function that returns the edited model's pieces.

    The function may fail on one rank only (CheckpointError), so the ranks must exchange its result.
    """
    contents = {**header, **state, "state_dict": {piece.name: shown(piece) for piece in pieces}}
    before: dict[str, Tensor] = dict(contents["state_dict"])
    edit(contents)
    if taken := sorted(contents.keys() & RESERVED):
        raise ValueError(
            f"on_save_checkpoint put {', '.join(taken)} into the checkpoint, which is reserved for the engine's state; "
            "choose another key."
        )
    tensors = _taken_tensors(contents, "on_save_checkpoint")

    def edited() -> list[Piece]:
        shown_as = [(piece, before[piece.name]) for piece in pieces]
        unchanged = [piece for piece, tensor in shown_as if tensors.get(piece.name) is tensor and is_range(tensor)]
        # Unchanged tensors keep their pieces, with writers and ties. Replaced tensors become new pieces.
        names = {piece.name for piece in unchanged}
        return [*unchanged, *(stored(name, value) for name, value in tensors.items() if name not in names)]

    return {key: value for key, value in contents.items() if key not in header}, edited


def edit_for_load(
    checkpoint: StoredCheckpoint, state: Mapping[str, Any], header: Mapping[str, int], edit: Edit
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the edited state, and the edited whole tensors of the model."""
    contents = {**header, **state, "state_dict": checkpoint.read_tensors("model")}
    edit(contents)
    tensors = _taken_tensors(contents, "on_load_checkpoint")
    return {key: value for key, value in contents.items() if key not in header}, dict(tensors)


def _taken_tensors(contents: dict[str, Any], hook: str) -> Mapping[str, Tensor]:
    tensors = contents.pop("state_dict", {})
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise TypeError(f"{hook} set a state_dict that is not a dict of tensors. Put other values under another key.")
    return tensors


def check_model(
    path: str,
    stored: Mapping[str, Sequence[int]],
    pieces: Sequence[Piece],
    strict: bool,
    lazy: Iterable[str] = (),
    loosened: str = "set strict_loading = False on the module",
) -> list[Piece]:
    """Return the pieces that a checkpoint with these names and shapes fills. Reject a checkpoint of another model.

    With strict=False, tensors that only one side has are skipped. `lazy` lists the model's tensors that accept any shape, and
    `loosened` tells users how to disable strict loading.
    """
    here: dict[str, Any] = {**{piece.name: tuple(piece.shape) for piece in pieces}, **dict.fromkeys(lazy, "(lazy)")}
    there = {name: tuple(shape) for name, shape in stored.items()}
    missing = [f"{name} {here[name]}" for name in sorted(here.keys() - there.keys()) if strict]
    unexpected = [f"{name} {there[name]}" for name in sorted(there.keys() - here.keys()) if strict]
    unlike = [
        f"{name} {there[name]} there, {shape} here"
        for name, shape in here.items()
        if shape not in ("(lazy)", there.get(name, shape))
    ]
    problems = {"not in it": missing, "only in it": unexpected, "other shape": unlike}
    if any(problems.values()):
        partly = f", or {loosened} to load the matching part" if not unlike else ""
        raise CheckpointError(
            f"{path}: it is of another model ({_described(problems)}). Build the model that was saved, or choose "
            f"another checkpoint{partly}."
        )
    return [piece for piece in pieces if piece.name in stored]


def _described(problems: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(
        f"{title}: {', '.join(names[:5])}{f' ... ({len(names)} in all)' if len(names) > 5 else ''}"
        for title, names in problems.items()
        if names
    )


def base_pieces(path: str, base: Base, pieces: Iterable[Piece], strict: bool) -> list[Piece]:
    """Return the pieces of the base. CheckpointError if strict and the model lacks a part, or if a shape differs."""
    shapes = {name: shape for name, (_, shape, _) in base.items()}
    return check_model(path, shapes, [piece for piece in pieces if piece.name in base], strict)


def with_base(
    module: nn.Module, state: Mapping[str, object], strict: bool, path: str, base: Base
) -> Mapping[str, object]:
    """Return a state_dict with the module's tensors for the frozen base. CheckpointError if they differ from the base."""
    base = {name: entry for name, entry in base.items() if name not in state}
    if not base:
        return state
    own = {clean_name(name): value for name, value in module.state_dict().items() if clean_name(name) in base}
    frozen = base_pieces(path, base, [Piece(name, tuple(value.shape), 0, value) for name, value in own.items()], strict)
    check_base(path, base, frozen, Ranks())
    return {**state, **own}


def load_state(module: nn.Module, state: Mapping[str, Any], strict: bool, path: str) -> None:
    """Load a state_dict with the module's `load_state_dict`. CheckpointError describes how another model differs."""
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
        stored = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
        lazy = [name for name, tensor in tensors.items() if is_lazy(tensor)]
        pieces = [Piece(name, tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items() if name not in lazy]
        # This raises an error if names or shapes differ. Otherwise the module rejects the state for another reason.
        check_model(path, stored, pieces, strict, lazy, "pass strict=False")
        raise CheckpointError(f"{path}: the module does not accept it: {error}") from error


def fill(pieces: Sequence[Piece], tensors: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into their pieces, in place."""
    with torch.no_grad():
        for piece in pieces:
            flat = tensors[piece.name].reshape(-1)
            part = flat[piece.start : piece.start + piece.tensor.numel()]
            copy_whole(piece.tensor, part.reshape(piece.tensor.shape))
