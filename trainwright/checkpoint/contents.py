"""Contents: the files and the state that a run stores in its checkpoint.

    manifest.json                 step, epoch, world size, strategy; every tensor's shape, dtype and pieces; every digest.
    state.json                    plain data of the run.
        optimizers                parameter groups, and the values in their state that are not tensors.
        settings                  of the optimizers and schedulers, as text.
        precision, seed           the loss scale, and the seed of the data's order.
        strategy                  its state for a bitwise resume.
        extra                     values in the modules' state_dicts that are not tensors, such as extra states.
        frozen_base               dtypes, shapes and digests of the parameters that "model" omits.
        position                  epoch, batch, step.
        lr_schedulers, callbacks, metrics (the latest values), loggers (their run folders, and the sizes of their files).
    model-RRRRR.safetensors       parameters and buffers by their state_dict names. Names of a second model begin with ".1.".
    training-RRRRR.safetensors    if "model" contains averages: the weights and buffers from which a resumed run continues.
    average-RRRRR.safetensors     averages, if "model" does not contain them, or only in a lower precision.
    optimizer-RRRRR.safetensors   per-parameter tensors as "optimizer number/parameter/key".
    parameters-RRRRR.safetensors  parameters that are in no model, as "parameter optimizer number.index".
    rank-RRRRR.json               the RNG state of that rank and, within an epoch, its sums of logged values and its
                                  torchmetrics states (their tensors are in rank-RRRRR.safetensors).

RRRRR is the number of the rank that wrote the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.codec import encode_stored
from trainwright.checkpoint.manifest import rank_section
from trainwright.checkpoint.shards import check_storable
from trainwright.checkpoint.tensors import Piece, TensorEntry, assign_writers, tied_groups
from trainwright.checkpoint.vendor import MappingKey, tree_map, tree_map_with_path
from trainwright.devices.abilities import has_pinned_memory
from trainwright.devices.hardware import HOST
from trainwright.devices.locked_memory import LockedMemory
from trainwright.errors import CheckpointError, a_type_of
from trainwright.tensor_names import EXTRA_STATE, clean_name, is_extra_state, own_name

MODEL, TRAINING, AVERAGE = "model", "training", "average"
"""The sections whose tensors have the model's names and shapes."""
# A section of one of these names would collide with a file or a table of the plain data.
_SECTION = re.compile(r"(?!(?:state|rank|manifest)$)[a-z][a-z0-9_]{0,63}", re.ASCII)


class Contents(NamedTuple):
    """One rank's part of a checkpoint: its pieces by section, and encoded plain data with its tensors by file name."""

    sections: dict[str, list[Piece]]
    plain: dict[str, tuple[Any, list[Piece]]]


def collect(
    sections: Mapping[str, Sequence[Piece]], state: Any, rank_state: Any, rank: int, world_size: int
) -> Contents:
    """Return this rank's part of a checkpoint, without copies of tensors.

    Args:
        sections: this rank's pieces by section (model, optimizer, ...).
        state: plain data of the run, stored from rank 0.
        rank_state: plain data of this rank. None stores nothing.
    """
    for name in sections:
        if not _SECTION.fullmatch(name):
            raise CheckpointError(f"the section name {name!r} is not accepted: small letters, digits and _ are.")
    states = {"state": state} if rank == 0 else {}
    if rank_state is not None:
        states[rank_section(rank)] = rank_state
    plain = {name: encode_state(value, name) for name, value in states.items()}
    return Contents({name: assign_writers(pieces, rank, world_size) for name, pieces in sections.items()}, plain)


def with_parts(pieces: Sequence[Piece], parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, list[Piece]]:
    """Return the sections of a model's pieces with the tensors in `parts`, by section and name, instead of the current ones.

    In MODEL they get the dtypes of the module, and the other pieces stay.
    """
    values = parts.get(MODEL, {})
    model = [
        replace(piece, tensor=values[piece.name].to(piece.tensor.dtype)) if piece.name in values else piece
        for piece in pieces
    ]
    others = {
        section: [replace(piece, tensor=tensors[piece.name]) for piece in pieces if piece.name in tensors]
        for section, tensors in parts.items()
        if section != MODEL
    }
    return {MODEL: model, **others}


def encode_state(value: Any, name: str) -> tuple[Any, list[Piece]]:
    """Return a state as plain data, and its tensors. CheckpointError names a value that a checkpoint cannot store."""
    encoded, tensors = encode_stored(value, name)
    for key, tensor in tensors.items():
        check_storable(key, tensor)
    return encoded, [Piece(key, tuple(tensor.shape), 0, tensor) for key, tensor in tensors.items()]


def extra_states(module: nn.Module) -> dict[str, Any]:
    """Return the values in a module's state_dict that are not tensors, such as extra states."""
    state = module.state_dict(keep_vars=True)
    return {
        clean_name(name): value
        for name, value in state.items()
        if is_extra_state(name) or not isinstance(value, Tensor)
    }


def fitting_extra_states(module: nn.Module, states: Mapping[str, Any], path: str, strict: bool) -> dict[str, Any]:
    """Return the extra states of a checkpoint that `set_extra_state` accepts. CheckpointError if strict and not all match."""
    takers = {
        clean_name(f"{name}.{EXTRA_STATE}".lstrip("."))
        for name, child in module.named_modules()
        if type(child).set_extra_state is not nn.Module.set_extra_state
    }
    problems = [
        f"extra state {title}: {', '.join(sorted(names)[:5])}"
        for title, names in (("not in it", takers - states.keys()), ("only in it", states.keys() - takers))
        if names
    ]
    if strict and problems:
        raise CheckpointError(
            f"{path}: it is of another model ({'; '.join(problems)}). Build the model that was saved, or set "
            "strict_loading = False on the module to load the matching part."
        )
    return {name: value for name, value in states.items() if name in takers}


def set_extra_states(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Restore the submodules' extra states."""
    for name, value in states.items():
        if is_extra_state(name):
            module.get_submodule(own_name(module, name).rpartition(".")[0]).set_extra_state(value)


def describe_optimizer(optimizer: Optimizer, names: Mapping[Tensor, str], omitted: Collection[str]) -> dict[str, Any]:
    """Return the optimizer's parameter groups without the omitted keys, and the values in its state that are not tensors."""
    groups = []
    plain: dict[str, dict[str, Any]] = {}
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    _check_keys(optimizer, shared)
    for group in optimizer.param_groups:
        stored = {key: value for key, value in group.items() if key not in omitted}
        groups.append({**stored, "params": [names[parameter] for parameter in group["params"]]})
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            _check_keys(optimizer, state)
            if values := {key: value for key, value in state.items() if not isinstance(value, Tensor)}:
                plain[names[parameter]] = values
    described = {"type": type(optimizer).__name__, "groups": groups, "plain": plain}
    return {**described, "shared": shared} if shared else described


def _check_keys(optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
    for key in state:
        # A load splits the stored name, "parameter/key", at its last slash.
        if not isinstance(key, str) or "/" in key:
            raise CheckpointError(
                f"the state of {type(optimizer).__name__} has the key {key!r}, but a checkpoint stores names without a "
                "slash. Rename it in the optimizer."
            )


def check_optimizer(
    number: int, optimizer: Optimizer, names: Mapping[Tensor, str], described: Mapping[str, Any], path: str
) -> None:
    """Reject the state of an optimizer of another type or with other parameters (CheckpointError)."""
    stored = [name for group in described["groups"] for name in group["params"]]
    present = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    if len(described["groups"]) != len(optimizer.param_groups) or sorted(stored) != sorted(present):
        odd = sorted(set(stored) ^ set(present))[:5]
        raise CheckpointError(
            f"{path}: optimizer {number} was saved with {len(described['groups'])} parameter groups of {len(stored)} "
            f"parameters, but this run's has {len(optimizer.param_groups)} groups of {len(present)}"
            + (f" (unlike: {', '.join(odd)})" if odd else "")
            + ". Build the same optimizer to resume, or load only the weights."
        )
    if described["type"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{path}: optimizer {number} was saved by {described['type']}, but this run's is {a_type_of(optimizer)}. "
            "Build the same optimizer to resume, or load only the weights."
        )


def restore_optimizer(
    optimizer: Optimizer, names: Mapping[Tensor, str], described: Mapping[str, Any], model: Mapping[str, TensorEntry]
) -> None:
    """Restore the values of the parameter groups and the plain values of the state. Tensors are read into the pieces.

    Tensors in plain values (LBFGS has lists of them) go to the parameter's device, as in torch's load_state_dict.
    """
    for group, stored in zip(optimizer.param_groups, described["groups"], strict=True):
        for key, value in stored.items():
            if key != "params":
                group[key] = _placed_as(value, group.get(key))
        for parameter in group["params"]:
            if plain := described["plain"].get(names[parameter]):
                was = model.get(names[parameter])
                optimizer.state[parameter].update(placed(plain, parameter, was.dtype if was is not None else None))
    if shared := described.get("shared", {}):
        device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))

        def moved(leaf: Any) -> Any:
            # This state belongs to no parameter. Counts and RNG states in it stay on the host.
            is_computed_with = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 0
            return leaf.to(device) if is_computed_with else leaf

        optimizer.state.update(tree_map(moved, shared))


def placed(value: Any, parameter: Tensor, was: torch.dtype | None) -> Any:
    """Return plain state with its tensors on the parameter's device. Tensors of its saved dtype `was` get its present dtype."""

    def moved(path: tuple[Any, ...], leaf: Any) -> Any:
        # A count of steps in half precision would stop growing, because bfloat16 counts to 256.
        if not isinstance(leaf, Tensor) or path[-1:] == (MappingKey("step"),):
            return leaf
        return leaf.to(parameter.device, parameter.dtype if leaf.dtype == was else leaf.dtype)

    return tree_map_with_path(moved, value)


def _placed_as(value: Any, present: Any) -> Any:
    """Return a stored value of a group, such as a learning rate, with its tensors on the current tensors' devices."""
    if isinstance(value, Tensor) and isinstance(present, Tensor):
        return value.to(present.device)
    if isinstance(value, (list, tuple)) and isinstance(present, (list, tuple)) and len(value) == len(present):
        return type(value)(_placed_as(one, other) for one, other in zip(value, present, strict=True))
    return value


def with_dtypes_of(
    names: Mapping[Tensor, str], entries: Mapping[str, TensorEntry], model: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return entries for a resume in a different precision. State in its parameter's saved dtype gets the current dtype."""
    present = {name: parameter.dtype for parameter, name in names.items()}

    def converted(name: str, entry: TensorEntry) -> TensorEntry:
        parameter, key = name.rsplit("/", 1)
        was, dtype = model.get(parameter), present.get(parameter)
        if was is None or dtype is None or was.dtype == dtype or entry.dtype != was.dtype:
            return entry
        if key.endswith((".scale", ".qmap")):
            return entry  # of 8-bit state, which is computed with in float32
        if not entry.shape and (was.shape or key == "step"):
            return entry  # a count, which does not have the parameter's shape
        return replace(entry, dtype=dtype)

    return {name: converted(name, entry) for name, entry in entries.items()}


ALIGNMENT = 64


class HostMemory:
    """A host copy of a rank's pieces, so that training can change the originals while a thread writes.

    The memory stays for the next save, because fresh pages cost more than the copy.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._locked: LockedMemory | None = None

    def release(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._locked is not None:
            self._locked.release()
            self._locked = None

    def copy(self, parts: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
        """Return the pieces with copies of their tensors. Tied pieces stay tied. The next call overwrites the copies."""
        groups = [group for pieces in parts for group in tied_groups(pieces)]
        for group in groups:
            check_storable(group[0].name, group[0].tensor)
        copied: dict[int, Piece] = {}
        devices = {group[0].tensor.device for group in groups}
        with torch.inference_mode(False), torch.no_grad():  # a validation may save
            self._reserve(sum(_room(group[0].tensor) for group in groups), {device.type for device in devices})
            offset = 0
            for group in groups:
                tensor = group[0].tensor
                room = self._memory[offset : offset + tensor.nbytes]
                copy = room.view(tensor.dtype).view(tensor.shape) if tensor.numel() else tensor.new_empty(tensor.shape)
                copy.copy_(tensor, non_blocking=self._locked is not None)  # MPS never waits for other memory
                offset += _room(tensor)
                copied.update((id(piece), replace(piece, tensor=copy)) for piece in group)
        if self._locked is not None:
            for device in devices - {HOST}:
                torch.accelerator.synchronize(device)
        return [[copied[id(piece)] for piece in pieces] for pieces in parts]

    def _reserve(self, size: int, device_types: Collection[str]) -> None:
        locking = next((kind for kind in sorted(device_types) if has_pinned_memory(kind)), None)
        if size > self._memory.numel() or (locking is None) != (self._locked is None):
            self.release()  # first, so that old and new memory never coexist
            more = size // 16 + (1 << 20)  # metrics grow a little from save to save
            if locking is None:
                self._memory = torch.empty(size + more, dtype=torch.uint8)
            else:
                self._locked = LockedMemory(size + more, locking)
                self._memory = self._locked.tensor


def _room(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
