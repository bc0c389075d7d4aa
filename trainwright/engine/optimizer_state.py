"""Optimizer state: the state of a run's optimizers, into a checkpoint and out of one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from trainwright.checkpoint.codec import decode, encode_stored
from trainwright.checkpoint.contents import check_optimizer, restore_optimizer, with_dtypes_of
from trainwright.checkpoint.reader import StoredCheckpoint
from trainwright.distributed.collectives import broadcast_tensors, table_of
from trainwright.distributed.ranks import Ranks
from trainwright.engine.named_state import Named, optimizer_pieces
from trainwright.engine.script_settings import fresh_group
from trainwright.errors import CheckpointError
from trainwright.strategies import Strategy


def describe_optimizers(strategy: Strategy, named: Named, ranks: Ranks) -> list[dict[str, Any]]:
    """Return each optimizer's groups and the values in its state that belong to no piece, the same on every rank. Collective.

    Raises:
        CheckpointError: a value cannot be stored; if each rank owns a part of the state, on every rank.
    """
    if not strategy.capabilities.divides_optimizers or ranks.world_size == 1:
        return [strategy.describe_optimizer(optimizer, names) for optimizer, names in named]
    error = ""
    described: list[dict[str, Any]] = []
    plain: list[Any] = []
    tensors: dict[str, Tensor] = {}
    # A refusal waits for the exchange, since the other ranks wait there for this one.
    try:
        for number, (optimizer, names) in enumerate(named):
            described.append(strategy.describe_optimizer(optimizer, names))
            subject = f"the state of {type(optimizer).__name__}" + (f" (optimizer {number})" if number else "")
            text, found = encode_stored(described[-1]["plain"], subject)
            plain.append(text)
            tensors |= found
    except CheckpointError as refused:
        error = str(refused)
    own = {"error": error, "plain": plain, "tensors": table_of(tensors)}
    parts = ranks.exchange(own, "a save of the optimizers' state")
    if errors := [each["error"] for each in parts if each["error"]]:
        raise CheckpointError(errors[0])
    joined: list[dict[str, Any]] = [{} for _ in described]
    for rank, part in enumerate(parts):
        sent = broadcast_tensors(part["tensors"], tensors if rank == ranks.rank else None, rank, strategy.device)
        for values, text in zip(joined, part["plain"], strict=True):
            values.update(decode(text, sent))
    return [{**each, "plain": values} for each, values in zip(described, joined, strict=True)]


def check_optimizers(checkpoint: StoredCheckpoint, state: dict[str, Any], named: Named) -> None:
    """Refuse a checkpoint of other optimizers, or without any (CheckpointError)."""
    described = state.get("optimizers")
    if described is None:
        raise CheckpointError(
            f"{checkpoint.path}: it holds weights only, so a run cannot be resumed from it; load it as weights, or resume from "
            "a full checkpoint."
        )
    if len(described) != len(named):
        raise CheckpointError(
            f"{checkpoint.path}: it holds {len(described)} optimizers, but this run has {len(named)}. Build the same "
            "optimizers to resume, or load the weights alone."
        )
    for number, (optimizer, names) in enumerate(named):
        check_optimizer(number, optimizer, names, described[number], checkpoint.path)


def load_optimizers(
    checkpoint: StoredCheckpoint, state: dict[str, Any], strategy: Strategy, named: Named, fresh: Collection[str]
) -> None:
    """Load the optimizers' state, each process its part; the settings in `fresh` stay those of the script."""
    model = checkpoint.tensors("model")
    entries = checkpoint.tensors("optimizer") if "optimizer" in checkpoint.sections else {}
    for number, (optimizer, names) in enumerate(named):
        prefix = f"{number}/"
        own = {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix)}
        # The state's tensors have to exist before pieces of them can be read in place.
        strategy.allocate_optimizer_state(optimizer, names, with_dtypes_of(names, own, model))
        described = state["optimizers"][number]
        groups = zip(described["groups"], optimizer.param_groups, strict=True)
        described = {**described, "groups": [fresh_group(stored, present, fresh) for stored, present in groups]}
        restore_optimizer(optimizer, names, described, model)
    if pieces := optimizer_pieces(strategy, named):  # plain SGD has no state at all
        checkpoint.read_into("optimizer", pieces)
