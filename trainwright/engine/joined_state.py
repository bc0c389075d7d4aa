"""Joined state: what in the optimizers' state is no parameter's tensor, brought together of the ranks that own its parts."""

from __future__ import annotations

from typing import Any

import torch

from trainwright.checkpoint.codec import decode, encode_stored
from trainwright.distributed.nests import broadcast_tensors, table_of
from trainwright.distributed.ranks import Ranks
from trainwright.engine.named_state import Named
from trainwright.errors import CheckpointError
from trainwright.strategies import Strategy


def describe_optimizers(strategy: Strategy, named: Named, ranks: Ranks) -> list[dict[str, Any]]:
    """Return each optimizer's groups and what in its state is no tensor, alike on every rank. Collective.

    Raises:
        CheckpointError: a value has no place in a checkpoint; where each rank owns a part, on every rank alike.
    """
    if not strategy.divides_optimizers or ranks.world_size == 1:
        return [strategy.describe_optimizer(optimizer, names) for optimizer, names in named]
    error = ""
    described: list[dict[str, Any]] = []
    plain: list[Any] = []
    tensors: dict[str, torch.Tensor] = {}
    try:
        for number, (optimizer, names) in enumerate(named):
            described.append(strategy.describe_optimizer(optimizer, names))
            name = f"the state of {type(optimizer).__name__}" + (f" (optimizer {number})" if number else "")
            text, found = encode_stored(described[-1]["plain"], name)
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
