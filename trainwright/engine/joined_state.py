"""Joined state: what in the optimizers' state is no parameter's tensor, brought together of the ranks that own its parts."""

from __future__ import annotations

from typing import Any

import torch

from trainwright.checkpoint.codec import decode, encode_stored
from trainwright.distributed import collectives
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
    shapes = [[key, str(each.dtype).removeprefix("torch."), list(each.shape)] for key, each in tensors.items()]
    own = {"error": error, "plain": plain, "tensors": shapes}
    parts = ranks.exchange(own, "a save of the optimizers' state")
    if errors := [each["error"] for each in parts if each["error"]]:
        raise CheckpointError(errors[0])
    joined: list[dict[str, Any]] = [{} for _ in described]
    for rank, part in enumerate(parts):
        sent = _sent(part["tensors"], tensors, rank, rank == ranks.rank, strategy.device)
        for values, text in zip(joined, part["plain"], strict=True):
            values.update(decode(text, sent))
    return [{**each, "plain": values} for each, values in zip(described, joined, strict=True)]


def _sent(
    shapes: list[tuple[str, str, list[int]]],
    own: dict[str, torch.Tensor],
    source: int,
    is_own: bool,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return the tensors that one rank has among its plain values, which few optimizers have. Collective."""
    sent = {}
    for key, name, shape in shapes:
        dtype = getattr(torch, name)
        value = own[key] if is_own else torch.empty(shape, dtype=dtype)
        data = value.detach().to(device).contiguous().reshape(-1).view(torch.uint8)  # of whatever dtype
        sent[key] = collectives.broadcast(data, source).view(dtype).reshape(shape)
    return sent
