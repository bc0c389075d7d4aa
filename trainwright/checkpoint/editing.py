"""A checkpoint's contents as one dict, for hooks that add, remove or change values.

Its "state_dict" holds the model's tensors by name: at a save whole tensors, or this rank's parts if the strategy shards them
(RankPart); at a load whole tensors in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainwright.checkpoint.reader import StoredCheckpoint
from trainwright.checkpoint.shards import copy_whole
from trainwright.checkpoint.tensors import Piece, is_range, shown, stored
from trainwright.errors import CheckpointError

RESERVED = frozenset({"seed", "extra", "precision", "strategy", "optimizers"})
"""Keys under which the engine keeps its own state."""
Edit = Callable[[dict[str, Any]], None]
"""Changes a checkpoint's contents in place."""


def edit_for_save(
    state: Mapping[str, Any], pieces: Sequence[Piece], header: Mapping[str, int], edit: Edit
) -> tuple[dict[str, Any], Callable[[], list[Piece]]]:
    """Return the edited state, and a function that returns the edited model's pieces.

    The function may fail on one rank only (CheckpointError), so exchange its result.
    """
    contents = {**header, **state, "state_dict": {piece.name: shown(piece) for piece in pieces}}
    before: dict[str, Tensor] = dict(contents["state_dict"])
    edit(contents)
    if taken := sorted(contents.keys() & RESERVED):
        raise ValueError(
            f"on_save_checkpoint put {', '.join(taken)} into the checkpoint, which is reserved for the engine's state; choose "
            "another key."
        )
    tensors = _taken_tensors(contents, "on_save_checkpoint")

    def left() -> list[Piece]:
        shown_as = [(piece, before[piece.name]) for piece in pieces]
        kept = [piece for piece, tensor in shown_as if tensors.get(piece.name) is tensor and is_range(tensor)]
        # Untouched tensors keep their pieces, and with them their writers and ties; replaced ones become new pieces.
        known = {piece.name for piece in kept}
        return [*kept, *(stored(name, value) for name, value in tensors.items() if name not in known)]

    return {key: value for key, value in contents.items() if key not in header}, left


def edit_for_load(
    checkpoint: StoredCheckpoint, state: Mapping[str, Any], header: Mapping[str, int], edit: Edit
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the edited state, and the edited tensors of the model, read whole."""
    contents = {**header, **state, "state_dict": checkpoint.read_tensors("model")}
    edit(contents)
    tensors = _taken_tensors(contents, "on_load_checkpoint")
    return {key: value for key, value in contents.items() if key not in header}, dict(tensors)


def _taken_tensors(contents: dict[str, Any], hook: str) -> Mapping[str, Tensor]:
    tensors = contents.pop("state_dict", {})
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise TypeError(f"{hook} left a state_dict that is not a dict of tensors; put other values under another key.")
    return tensors


def check_model(
    path: str,
    stored: Mapping[str, Sequence[int]],
    pieces: Sequence[Piece],
    strict: bool,
    lazy: Iterable[str] = (),
    loosened: str = "set strict_loading = False on the module",
) -> list[Piece]:
    """Return the pieces that a checkpoint with these names and shapes fills; refuse one of another model.

    With strict False, tensors that only one side has are skipped. `lazy` names tensors of the model that accept any shape, and
    `loosened` says how the caller's user asks for strict False.
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
    problems = [
        f"{title}: {', '.join(names[:5])}{f' ... ({len(names)} in all)' if len(names) > 5 else ''}"
        for title, names in (("not in it", missing), ("only in it", unexpected), ("other shape", unlike))
        if names
    ]
    if problems:
        partly = f", or {loosened} to load what matches" if not unlike else ""
        raise CheckpointError(
            f"{path}: it is of another model ({'; '.join(problems)}). Build the model that was saved, or choose "
            f"another checkpoint{partly}."
        )
    return [piece for piece in pieces if piece.name in stored]


def load_state(module: nn.Module, state: Mapping[str, Any], strict: bool, path: str) -> None:
    """Load a state_dict with the module's own `load_state_dict`; CheckpointError says how another model differs."""
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        own = {name: each for name, each in module.state_dict().items() if isinstance(each, Tensor)}
        stored = {name: tuple(each.shape) for name, each in state.items() if isinstance(each, Tensor)}
        lazy = [name for name, each in own.items() if is_lazy(each)]
        pieces = [Piece(name, tuple(each.shape), 0, each) for name, each in own.items() if name not in lazy]
        # It raises if names or shapes differ; whatever passes here, the module refuses for another reason.
        check_model(path, stored, pieces, strict, lazy, "pass strict=False")
        raise CheckpointError(f"{path}: the module does not accept it: {error}") from error


def fill(pieces: Sequence[Piece], tensors: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into the pieces of them, in place."""
    with torch.no_grad():
        for piece in pieces:
            flat = tensors[piece.name].reshape(-1)
            part = flat[piece.start : piece.start + piece.tensor.numel()]
            copy_whole(piece.tensor, part.reshape(piece.tensor.shape))
