"""Nests: plain data and the tensors in it, as checkpoint/codec.py encodes them, sent from rank to rank. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.distributed import collectives

LENGTH = 8
"""Bytes of a length."""
Table = list[tuple[str, str, list[int]]]
"""Each tensor's name, dtype and shape, as JSON can hold them."""


def table_of(tensors: Mapping[str, Tensor]) -> Table:
    """Return what the other ranks need to know of tensors in order to receive them."""
    return [(name, str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in tensors.items()]


def broadcast_tensors(
    table: Table, own: Mapping[str, Tensor] | None, source: int, device: torch.device
) -> dict[str, Tensor]:
    """Return rank `source`'s tensors on this device; `own` are they on that rank, else None. Collective."""
    received = {}
    for name, dtype_name, shape in table:
        dtype = getattr(torch, dtype_name)
        tensor = torch.empty(shape, dtype=dtype) if own is None else own[name].detach()
        data = _as_bytes(tensor.to(device).contiguous())  # a backend need not know the dtype
        received[name] = collectives.broadcast(data, source).view(dtype).reshape(shape)
    return received


def gather_nests(plain: Any, tensors: Mapping[str, Tensor]) -> list[tuple[Any, dict[str, Tensor]]]:
    """Return the nests of all ranks, by rank, with their tensors in host memory. Collective: call on every rank."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    parts = [_as_bytes(tensor) for tensor in held.values() if tensor.numel()]
    blobs = collectives.gather_uneven(torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8))
    described = collectives.gather_object([plain, [list(row) for row in table_of(held)]])
    return [(text, _split(table, blob)) for (text, table), blob in zip(described, blobs, strict=True)]


def scatter_nests(nests: Sequence[tuple[Any, Mapping[str, Tensor]]] | None) -> tuple[Any, dict[str, Tensor]]:
    """Return this rank's nest of those that rank 0 has, one for each rank (None on the others), in host memory. Collective."""
    packed = None if nests is None else [_packed(*nest) for nest in nests[1:]]
    received = collectives.scatter_bytes(packed)
    if nests is not None:
        return nests[0][0], dict(nests[0][1])
    size = int.from_bytes(bytes(received[:LENGTH].tolist()), "little")
    plain, table = json.loads(received[LENGTH : LENGTH + size].numpy().tobytes())
    return plain, _split(table, received[LENGTH + size :])


def _packed(plain: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a nest as bytes: the length of its text, the text, and the tensors."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps([plain, table_of(held)]).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(LENGTH, "little") + text), dtype=torch.uint8)
    return torch.cat([head, *(_as_bytes(tensor) for tensor in held.values() if tensor.numel())])


def _as_bytes(tensor: Tensor) -> Tensor:
    # torch calls a tensor of one element contiguous whatever its strides, but refuses to view that as a different dtype.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _split(table: Table, blob: Tensor) -> dict[str, Tensor]:
    tensors, start = {}, 0
    for name, dtype_name, shape in table:
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        part = blob[start : start + size].clone()  # memory of its own: aligned, and the blob can be freed
        tensors[name] = part.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        start += size
    return tensors
