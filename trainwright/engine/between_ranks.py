"""Between ranks: what one process hands to all, and what all of them divide. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.codec import decode, encode
from trainwright.distributed.nests import broadcast_tensors, table_of
from trainwright.distributed.ranks import Ranks


def broadcast(obj: Any, source: int, ranks: Ranks, device: torch.device) -> Any:
    """Return the source's object on every rank: plain data over the store, tensors over the process group.

    Raises:
        TypeError: on every rank, if it is more than plain data and tensors.
    """
    if not 0 <= source < ranks.world_size:
        raise ValueError(f"src={source} is not a rank; choose from 0 to {ranks.world_size - 1}.")
    if ranks.world_size == 1:
        return obj
    own: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    if ranks.rank == source:
        try:
            plain, tensors = encode(obj, "obj")
            own = {"plain": plain, "tensors": table_of(tensors)}
        except TypeError as error:
            own = {"error": str(error)}
    received = ranks.exchange(own, f"broadcast from rank {source}")[source]
    if "error" in received:
        raise TypeError(f"broadcast from rank {source}: {received['error']}")
    is_source = ranks.rank == source
    sent = broadcast_tensors(received["tensors"], tensors if is_source else None, source, device)
    return obj if is_source else decode(received["plain"], sent)


def portion(inputs: Any, rank: int, world_size: int, pad: bool) -> Any:
    """Return a rank's contiguous part of a list, a tuple, a tensor, or of each value of a dict; the first are the longer ones.

    With `pad` shorter parts are filled up with the last item, so that all are equally long.

    Raises:
        TypeError, ValueError: inputs that cannot be divided.
    """
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the values to split have different lengths ({lengths}); give each of them the same.")
        return {key: portion(value, rank, world_size, pad) for key, value in inputs.items()}
    if not isinstance(inputs, (list, tuple, Tensor)):
        raise TypeError(
            f"split_between_processes was given a {type(inputs).__name__}; accepted are a list, a tuple, a tensor, or a dict "
            "of these."
        )
    size, larger = divmod(len(inputs), world_size)
    start = rank * size + min(rank, larger)
    count = size + (rank < larger)
    if not pad or count == size + (larger > 0):
        return inputs[start : start + count]
    places = [*range(start, start + count), len(inputs) - 1]
    return inputs[places] if isinstance(inputs, Tensor) else type(inputs)(inputs[place] for place in places)
