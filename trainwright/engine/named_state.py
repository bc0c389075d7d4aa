"""Named state: tensors of modules and optimizers by their names in a checkpoint, their loads, and waiting gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from trainwright.checkpoint.codec import decode, encode_stored
from trainwright.checkpoint.contents import check_optimizer, extra_states, restore_optimizer, with_dtypes_of
from trainwright.checkpoint.frozen_base import Base, describe_base
from trainwright.checkpoint.reader import StoredCheckpoint
from trainwright.checkpoint.tensors import Piece
from trainwright.distributed.collectives import broadcast_tensors, table_of
from trainwright.distributed.ranks import Ranks
from trainwright.engine.script_settings import fresh_group
from trainwright.errors import CheckpointError
from trainwright.strategies import Strategy
from trainwright.tensor_names import clean_name, is_extra_state, named_tensors, names_of, state_entries

STRAY = "parameter"
"""The name of a parameter in no module. The optimizer's number and the parameter's index there follow."""
Named = list[tuple[Optimizer, dict[Tensor, str]]]
"""The optimizers, with the names of all parameters."""


def refuse_unlike_models(module: nn.Module, ranks: Ranks) -> None:
    """Raise ValueError on every rank for a model that differs between ranks. Collective.

    It comes before the first collective on weights, which would hang or mix up tensors that differ.
    """
    layouts: list[list[str]] = [] if ranks.world_size == 1 else ranks.differing(_layout(module), "comparing the models")
    for rank, layout in enumerate(layouts):
        if layout != layouts[0]:
            pairs = zip_longest(layouts[0], layout, fillvalue="nothing more")
            here, there = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"rank {rank} built a different {type(module).__name__} than rank 0: rank 0 has {here} where rank {rank} has "
                f"{there}. Build the same model on every rank (the weights may differ): do not branch on the rank, and freeze "
                "the same parameters everywhere."
            )


def _layout(module: nn.Module) -> list[str]:
    """Return a description of every parameter, then of every buffer, in the module's order."""
    rows = []
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            shape = "of a shape not known yet" if is_lazy(tensor) else f"of shape {tuple(tensor.shape)}"
            frozen = ", frozen" if kind == "parameter" and not tensor.requires_grad else ""
            rows.append(f"{clean_name(name)!r}, a {kind} {shape} and {tensor.dtype}{frozen}")
    return rows


def model_pieces(strategy: Strategy, modules: Sequence[nn.Module]) -> list[Piece]:
    """Return this rank's pieces of the modules' tensors."""
    return [
        dataclasses.replace(piece, name=prefix_of(number) + piece.name)
        for number, module in enumerate(modules)
        for piece in strategy.model_pieces(module)
    ]


def computed_keys(strategy: Strategy, module: nn.Module) -> list[str]:
    """Return the keys of computed state_dict entries, which no load can write into (CheckpointError if sharded)."""
    names = [name for name, _, is_in_use in state_entries(module) if not is_in_use]
    if names and not strategy.capabilities.holds_modules:
        raise CheckpointError(
            f"{names[0]!r} in the state_dict of {type(module).__name__} is computed from tensors of which each rank has a "
            f"part, or a copy in low precision, under strategy={strategy.name!r}. Store it as a parameter or buffer, or "
            "choose 'ddp'."
        )
    return names


def optimizer_pieces(strategy: Strategy, named: Named) -> list[Piece]:
    """Return this rank's pieces of the optimizers' tensors, named "optimizer number/parameter/key"."""
    return [
        dataclasses.replace(piece, name=f"{number}/{piece.name}")
        for number, (optimizer, names) in enumerate(named)
        for piece in strategy.optimizer_pieces(optimizer, names)
    ]


def named_optimizers(modules: Iterable[nn.Module], optimizers: Sequence[Optimizer]) -> Named:
    """Return the optimizers with the names of all parameters, in modules and stray."""
    names: dict[Tensor, str] = {}
    for number, module in enumerate(modules):
        for tensor, name in names_of(module).items():
            names.setdefault(tensor, prefix_of(number) + name)
    for number, position, stepped in _stepped(optimizers):
        names.setdefault(stepped, f"{STRAY} {number}.{position}")  # unless it is in a module
    return [(optimizer, names) for optimizer in optimizers]


def stray_pieces(strategy: Strategy, modules: Iterable[nn.Module], optimizers: Sequence[Optimizer]) -> list[Piece]:
    """Return this rank's pieces of the parameters that optimizers step and that are in no module."""
    known: set[Tensor] = {parameter for module in modules for parameter in module.parameters()}
    holder = nn.Module()  # strategies return the pieces of modules
    for number, position, parameter in _stepped(optimizers):
        if parameter in known:
            continue
        known.add(parameter)
        name = f"{STRAY} {number}"
        if not hasattr(holder, name):
            holder.add_module(name, nn.Module())
        holder.get_submodule(name).register_buffer(str(position), parameter)
    return strategy.model_pieces(holder)


def frozen_base(
    strategy: Strategy,
    modules: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    ranks: Ranks,
    among: Collection[str] | None,
) -> Base:
    """Return the parameters that require no gradients and that no optimizer steps, with their digests. Collective."""
    trained = {parameter for _, _, parameter in _stepped(optimizers)}
    names = {
        prefix_of(number) + name
        for number, module in enumerate(modules)
        for name, tensor in named_tensors(module)
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and tensor not in trained
    }
    names = names if among is None else names.intersection(among)
    return describe_base([piece for piece in model_pieces(strategy, modules) if piece.name in names], ranks)


def loads_itself(module: nn.Module) -> bool:
    """Return whether a module loads more than the tensors in its state_dict."""
    return (
        type(module).load_state_dict is not nn.Module.load_state_dict
        or any(not is_extra_state(name) for name in extra_states(module))
        or any(map(is_lazy, chain(module.parameters(), module.buffers())))
    )


def _stepped(optimizers: Iterable[Optimizer]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the parameters with their optimizers' numbers and their indices there."""
    for number, optimizer in enumerate(optimizers):
        for position, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            yield number, position, parameter


def prefix_of(number: int) -> str:
    """Return the prefix of a module's names, which begins with a dot, unlike names in the first module."""
    return f".{number}." if number else ""


def held_gradients(modules: Sequence[nn.Module]) -> list[dict[str, Tensor]]:
    """Return this rank's part of each module's gradients, by the names of the parameters."""

    return [
        {name: _local(tensor.grad) for tensor, name in names_of(module).items() if tensor.grad is not None}
        for module in modules
    ]


def hold_gradients(modules: Sequence[nn.Module], held: Sequence[Mapping[str, Tensor]]) -> None:
    """Restore a result of `held_gradients` from this rank, in a job of the same strategy and size."""
    for module, gradients in zip(modules, held, strict=True):
        for parameter, name in names_of(module).items():
            if (gradient := gradients.get(name)) is not None:
                parameter.grad = torch.zeros_like(parameter)
                _local(parameter.grad).copy_(gradient)


def _local(tensor: Any) -> Tensor:
    """Return this rank's part of a gradient, which shares its memory."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


class ReplacedParameters:
    """The parameters that a strategy has replaced, for optimizers that were made before. It keeps none of them alive."""

    def __init__(self) -> None:
        self._now = WeakIdKeyDictionary()

    @contextmanager
    def followed(self, module: nn.Module) -> Iterator[None]:
        """Record which of the module's parameters the block replaces."""
        # By weak references, because a model that is sharded may not fit into memory twice.
        before = {name: TensorWeakRef(tensor) for name, tensor in module.named_parameters(remove_duplicate=False)}
        yield
        for name, now in module.named_parameters(remove_duplicate=False):
            was = before[name]() if name in before else None
            if was is not None and was is not now:
                self._now[was] = now

    def current(self, parameter: Tensor) -> Tensor:
        """Return a parameter's replacement, or the parameter itself."""
        now: Tensor = self._now.get(parameter, parameter)  # type: ignore[no-untyped-call]
        return now

    def update(self, optimizers: Iterable[Optimizer]) -> None:
        """Replace the parameters of optimizers (ValueError if an optimizer has stepped)."""
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            for group in optimizer.param_groups:
                now = [self.current(parameter) for parameter in group["params"]]
                if any(
                    new is not old and optimizer.state.get(old) for old, new in zip(group["params"], now, strict=True)
                ):
                    raise ValueError(
                        f"the {kind} has state for a parameter that the strategy has replaced; prepare it before its first "
                        "step (a new one in every configure_optimizers), and load its state afterwards."
                    )
                group["params"] = now


def describe_optimizers(strategy: Strategy, named: Named, ranks: Ranks) -> list[dict[str, Any]]:
    """Return the groups of every optimizer and the plain values of its state, the same on every rank. Collective.

    Raises:
        CheckpointError: a value cannot be stored, on every rank if every rank owns a part of the state.
    """
    if not strategy.capabilities.divides_optimizers or ranks.world_size == 1:
        return [strategy.describe_optimizer(optimizer, names) for optimizer, names in named]
    error = ""
    described: list[dict[str, Any]] = []
    plain: list[object] = []
    tensors: dict[str, Tensor] = {}
    try:
        for number, (optimizer, names) in enumerate(named):
            described.append(strategy.describe_optimizer(optimizer, names))
            subject = f"the state of {type(optimizer).__name__}" + (f" (optimizer {number})" if number else "")
            text, found = encode_stored(described[-1]["plain"], subject)
            plain.append(text)
            tensors |= found
    except CheckpointError as refused:  # raised after the exchange, in which the other ranks wait for this one
        error = str(refused)
    message = {"error": error, "plain": plain, "tensors": table_of(tensors)}
    parts = ranks.exchange(message, "a save of the optimizers' state")
    if errors := [part["error"] for part in parts if part["error"]]:
        raise CheckpointError(errors[0])
    joined: list[dict[str, Any]] = [{} for _ in described]
    for rank, part in enumerate(parts):
        sent = broadcast_tensors(part["tensors"], tensors if rank == ranks.rank else None, rank, strategy.device)
        for values, text in zip(joined, part["plain"], strict=True):
            values.update(decode(text, sent))
    return [{**groups, "plain": values} for groups, values in zip(described, joined, strict=True)]


def check_optimizers(checkpoint: StoredCheckpoint, state: dict[str, Any], named: Named) -> None:
    """Raise CheckpointError for a checkpoint of other optimizers, or without any."""
    described = state.get("optimizers")
    if described is None:
        raise CheckpointError(
            f"{checkpoint.path}: it holds weights only, so a run cannot be resumed from it; load it as weights, or resume "
            "from a full checkpoint."
        )
    if len(described) != len(named):
        raise CheckpointError(
            f"{checkpoint.path}: it contains {len(described)} optimizers, but this run has {len(named)}. Build the same "
            "optimizers to resume, or load only the weights."
        )
    for number, (optimizer, names) in enumerate(named):
        check_optimizer(number, optimizer, names, described[number], checkpoint.path)


def load_optimizers(
    checkpoint: StoredCheckpoint, state: dict[str, Any], strategy: Strategy, named: Named, fresh: Collection[str]
) -> None:
    """Load this process's part of the optimizers' state. The settings in `fresh` stay the script's."""
    model = checkpoint.tensors("model")
    entries = checkpoint.tensors("optimizer") if "optimizer" in checkpoint.sections else {}
    for number, (optimizer, names) in enumerate(named):
        prefix = f"{number}/"
        stored = {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix)}
        # The state's tensors have to exist before pieces of them can be read in place.
        strategy.allocate_optimizer_state(optimizer, names, with_dtypes_of(names, stored, model))
        described = state["optimizers"][number]
        groups = zip(described["groups"], optimizer.param_groups, strict=True)
        described = {**described, "groups": [fresh_group(stored, present, fresh) for stored, present in groups]}
        restore_optimizer(optimizer, names, described, model)
    if pieces := optimizer_pieces(strategy, named):  # plain SGD has no state at all
        checkpoint.read_into("optimizer", pieces)
