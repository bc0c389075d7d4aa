"""Joined state: what in an optimizer's state is no parameter's tensor, brought together of the ranks that own its parts."""

from __future__ import annotations

from typing import Any

import torch

from trainwright.checkpoint.codec import decode, encode_stored
from trainwright.distributed import collectives
from trainwright.errors import CheckpointError


def join_plain(own: dict[str, Any], name: str, here: int, device: torch.device) -> dict[str, Any]:
    """Return the values of all ranks by their keys, of which each (this one is `here`) gives its own. Collective.

    Raises:
        CheckpointError: a value has no place in a checkpoint, on every rank alike.
    """
    error, plain = "", None
    tensors: dict[str, torch.Tensor] = {}
    try:
        plain, tensors = encode_stored(own, name)
    except CheckpointError as found:
        error = str(found)
    described = [[key, str(each.dtype).removeprefix("torch."), list(each.shape)] for key, each in tensors.items()]
    gathered = collectives.gather_object({"error": error, "plain": plain, "tensors": described})
    if told := [each["error"] for each in gathered if each["error"]]:
        raise CheckpointError(told[0])
    joined: dict[str, Any] = {}
    for rank, each in enumerate(gathered):
        sent = {}
        for key, dtype, shape in each["tensors"]:
            value = tensors[key] if rank == here else torch.empty(shape, dtype=getattr(torch, dtype))
            data = value.detach().to(device).contiguous().reshape(-1).view(torch.uint8)  # of whatever dtype
            sent[key] = collectives.broadcast(data, rank).view(getattr(torch, dtype)).reshape(shape)
        joined.update(decode(each["plain"], sent))
    return joined
