"""Between ranks: what one process hands to all, and what all of them divide. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.codec import decode, encode
from trainwright.distributed import collectives
from trainwright.distributed.agreement import Agreement


def broadcast(obj: Any, source: int, agreement: Agreement, device: torch.device, timeout_seconds: float) -> Any:
    """Return the source's object on every rank: plain data over the store, tensors over the process group.

    Raises:
        TypeError: on every rank alike, where it is more than plain data and tensors.
    """
    if not 0 <= source < agreement.world_size:
        raise ValueError(f"src={source} is not a rank; choose from 0 to {agreement.world_size - 1}.")
    if agreement.world_size == 1:
        return obj
    text = b""
    tensors: dict[str, Tensor] = {}
    if agreement.rank == source:
        try:
            plain, tensors = encode(obj, "obj")
            described = [[name, str(each.dtype).removeprefix("torch."), each.shape] for name, each in tensors.items()]
            text = json.dumps({"plain": plain, "tensors": described}).encode()
        except TypeError as error:
            text = json.dumps({"error": str(error)}).encode()
    received = json.loads(
        agreement.exchange(text, call=f"broadcast from rank {source}", timeout_seconds=timeout_seconds)[source]
    )
    if "error" in received:
        raise TypeError(f"broadcast from rank {source}: {received['error']}")
    sent: dict[str, Tensor] = {}
    for name, dtype, shape in received["tensors"]:
        own = tensors[name].to(device) if tensors else torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        sent[name] = collectives.broadcast(own, source)
    return obj if agreement.rank == source else decode(received["plain"], sent)


@contextmanager
def first_here(is_first: bool, agreement: Agreement, timeout_seconds: float) -> Iterator[None]:
    """Let those that are first go through the block before the others begin it."""
    if not is_first:
        agreement.exchange(b"", call="rank_zero_first or main_process_first", timeout_seconds=timeout_seconds)
    try:
        yield
    finally:
        if is_first:
            agreement.exchange(b"", call="rank_zero_first or main_process_first", timeout_seconds=timeout_seconds)


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
