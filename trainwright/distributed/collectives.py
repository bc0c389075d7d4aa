"""Collectives of the data ranks: of tensors, of JSON, and of nests, which are plain data with the tensors in it.

Broadcasts are over all ranks, and so are the others unless a strategy has a data group (`use_data_group`).
`checkpoint/codec.py` encodes nests, and nothing is pickled. In a job of one process every collective returns its input.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Exchange = Callable[[Any], list[Any]]
"""Returns the plain data of all ranks, by rank, as `gather_object` and `Ranks.exchange` do."""
Table = list[tuple[str, str, list[int]]]
"""The names, dtypes and shapes of a nest's tensors, as JSON can contain them."""
Nest = tuple[Any, Mapping[str, Tensor]]
"""Encoded plain data, and the tensors in it by name."""
_LENGTH_BYTES = 8
_MAX_DIMS = 8  # the exchange of shapes has room for this many
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}

_data_group: dist.ProcessGroup | None = None


def use_data_group(group: dist.ProcessGroup | None) -> None:
    """Run later collectives over this group of ranks with different data, or if None over all ranks."""
    global _data_group
    _data_group = group


def data_group() -> dist.ProcessGroup | None:
    """Return the group that `use_data_group` has set."""
    return _data_group


def num_data_ranks() -> int:
    return dist.get_world_size(_data_group) if dist.is_available() and dist.is_initialized() else 1


def data_rank(default: int) -> int:
    """Return this process's rank in the data group, or the default before a process group exists."""
    return dist.get_rank(_data_group) if dist.is_available() and dist.is_initialized() else default


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks, by rank. Shapes and dtypes must be equal. Collective: call on every rank."""
    if num_data_ranks() == 1:
        return [tensor]
    local = _to_group(tensor.detach())
    gathered = [torch.empty_like(local) for _ in range(num_data_ranks())]
    dist.all_gather(gathered, local, group=_data_group)
    return [piece.to(tensor.device) for piece in gathered]


def gather_stacked(
    tensor: Tensor, with_gradients: bool = False, on_uneven: Callable[[list[int]], None] | None = None
) -> Tensor:
    """Return the tensors of all ranks, stacked along a new first dimension. One process returns its tensor. Collective.

    With `with_gradients`, gradients flow back to the rank of each tensor. With `on_uneven`, ranks may have fewer rows: they
    repeat some of them, and `on_uneven` gets the rows of all ranks.

    Raises:
        ValueError, TypeError: on every rank, if shapes or dtypes differ otherwise.
    """
    if num_data_ranks() == 1:
        return tensor
    # Gloo ends the process at a gather of unequal shapes. For other backends the check would make the host wait for the device.
    if tensor.dim() <= _MAX_DIMS and (on_uneven is not None or dist.get_backend() == "gloo"):
        shapes = shapes_of(tensor, "all_gather")
        if len(set(shapes)) > 1:
            rows = [shape[0] for shape in shapes if shape]
            can_fill = len(rows) == len(shapes) and len({shape[1:] for shape in shapes}) == 1 and min(rows) > 0
            if on_uneven is None or not can_fill:
                raise ValueError(
                    f"all_gather got tensors of different shapes ({listed(shapes)}); they have to be equal. Pad them first, or "
                    "join them along their first dimension with trainer.engine.gather."
                )
            tensor = tensor[torch.arange(max(rows), device=tensor.device) % tensor.shape[0]]
            on_uneven(rows)
    if with_gradients:
        return torch.stack(_GatherWithGradients.apply(tensor))  # type: ignore[no-untyped-call]
    return torch.stack(all_gather(tensor))


def listed(shapes: list[tuple[int, ...]]) -> str:
    """Return the ranks' shapes in words."""
    return ", ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes))


def gather_uneven(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks, by rank. The first dimension may differ. Collective: call on every rank."""
    if not 0 < tensor.dim() <= _MAX_DIMS:
        raise ValueError(
            f"gather_uneven got a tensor of {tensor.dim()} dimensions; 1 to {_MAX_DIMS} are accepted. "
            "Add a dimension with unsqueeze(0), or reshape it."
        )
    if num_data_ranks() == 1:
        return [tensor]
    shapes = shapes_of(tensor, "gather")
    if len({shape[1:] for shape in shapes}) > 1:
        raise ValueError(
            f"gather got tensors whose shapes differ beyond the first dimension ({listed(shapes)}). Pad them with "
            "pad_across_processes(tensor, dim=1), or reshape them to the same number of dimensions. For "
            "objects of different shapes in a list call gather_for_metrics(objects, use_gather_object=True)."
        )
    longest = max(shape[0] for shape in shapes)
    if longest * math.prod(tensor.shape[1:]) == 0:
        return [tensor.new_empty(shape) for shape in shapes]
    if len(tensor) < longest:
        tensor = torch.cat([tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])])
    pieces = all_gather(tensor)
    # The copy frees the padding.
    pairs = zip(pieces, shapes, strict=True)
    return [piece if len(piece) == shape[0] else piece[: shape[0]].clone() for piece, shape in pairs]


def shapes_of(tensor: Tensor, call: str) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of all ranks, by rank (TypeError on every rank if the dtypes differ). Collective."""
    # The dtype is sent as a checksum of its name: a collective of different dtypes would read wrong bytes, or hang.
    numbers = [tensor.dim(), *tensor.shape] + [-1] * (_MAX_DIMS - tensor.dim())
    packed = torch.tensor([*numbers, zlib.crc32(str(tensor.dtype).encode())])
    rows = [row.tolist() for row in all_gather(packed)]
    if others := [rank for rank, row in enumerate(rows) if row[-1] != rows[0][-1]]:
        raise TypeError(
            f"{call} got a different dtype on rank(s) {others} than on rank 0 (here {tensor.dtype}); all must be "
            "equal. Convert the tensors first."
        )
    return [tuple(row[1 : 1 + row[0]]) for row in rows]


def gather_object(obj: object) -> list[Any]:
    """Return the plain data (None, bool, numbers, str, list, dict) of all ranks. Collective: call on every rank."""
    text = json.dumps(obj)
    if num_data_ranks() == 1:
        return [json.loads(text)]
    encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return [json.loads(bytes(piece.tolist())) for piece in gather_uneven(encoded)]


def all_reduce(tensor: Tensor, op: str = "sum", *, with_all: bool = False) -> Tensor:
    """Return the elementwise sum, mean, min or max over the data ranks as a new tensor. Collective: call on every rank.

    With `with_all` it is over all ranks, as a decision needs that may differ between ranks with the same data.
    """
    if op not in _REDUCE_OPS:
        raise ValueError(f"op={op!r} is unknown; choose from {', '.join(_REDUCE_OPS)}.")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"op='mean' got a {tensor.dtype} tensor; pass floating-point numbers. Use .double() first.")
    result = tensor.detach().clone()
    if world_size() > 1:
        group = None if with_all else _data_group
        result = _to_group(result)
        dist.all_reduce(result, _REDUCE_OPS[op], group=group)
        if op == "mean":
            result /= dist.get_world_size(group)
    return result.to(tensor.device)


def broadcast(tensor: Tensor, source: int = 0) -> Tensor:
    """Return rank `source`'s tensor as a new tensor. Shapes must be equal. Collective: call on every rank."""
    if not 0 <= source < world_size():
        raise ValueError(f"source={source} is not a rank; choose from 0 to {world_size() - 1}.")
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if world_size() > 1:
        result = _to_group(result)
        dist.broadcast(result, source)
    return result.to(tensor.device)


def table_of(tensors: Mapping[str, Tensor]) -> Table:
    """Return the table that other ranks need to receive these tensors."""
    return [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]


def broadcast_tensors(
    table: Table, local: Mapping[str, Tensor] | None, source: int, device: torch.device
) -> dict[str, Tensor]:
    """Return rank `source`'s tensors on this device. `local` has them on that rank, and is None elsewhere. Collective."""
    received = {}
    for name, dtype_name, shape in table:
        dtype = getattr(torch, dtype_name)
        tensor = torch.empty(shape, dtype=dtype) if local is None else local[name].detach()
        data = _as_bytes(tensor.to(device).contiguous())  # a backend need not know the dtype
        received[name] = broadcast(data, source).view(dtype).reshape(shape)
    return received


def gather_nests(plain: Any, tensors: Mapping[str, Tensor]) -> list[Nest]:
    """Return the nests of all ranks, by rank, with their tensors in host memory. Collective: call on every rank."""
    return [_unpacked(data) for data in gather_uneven(_packed(plain, tensors))]


def _packed(plain: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a nest as bytes in host memory: the length of its text, the text, and the tensors."""
    parts = [_as_bytes(tensor.detach().cpu().contiguous()) for tensor in tensors.values() if tensor.numel()]
    text = json.dumps([plain, table_of(tensors)]).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text), dtype=torch.uint8)
    return torch.cat([head, *parts])


def _unpacked(data: Tensor) -> Nest:
    start = _LENGTH_BYTES + int.from_bytes(bytes(data[:_LENGTH_BYTES].tolist()), "little")
    plain, table = json.loads(data[_LENGTH_BYTES:start].numpy().tobytes())
    tensors = {}
    for name, dtype_name, shape in table:
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        part = data[start : start + size].clone()  # aligned, and the data can be freed
        tensors[name] = part.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        start += size
    return plain, tensors


def _as_bytes(tensor: Tensor) -> Tensor:
    # torch calls a tensor of one element contiguous whatever its strides, but cannot view it as a different dtype.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _GatherWithGradients(torch.autograd.Function):
    """An all_gather whose backward sums the gradients of all ranks on the rank of the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, ...]:
        return tuple(all_gather(tensor))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return all_reduce(torch.stack(gradients))[dist.get_rank(_data_group)]


def group_backends() -> dict[str, str]:
    """Return the backend of the default process group for each type of device that it serves."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))  # "cpu:gloo,cuda:nccl"
    return {device_type: backend for device_type, _, backend in pairs}


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _to_group(tensor: Tensor) -> Tensor:
    """Move a tensor to a device that the group's backend can read."""
    if dist.get_backend() == "gloo":  # gloo has only some collectives for other devices
        return tensor.cpu().contiguous()
    served = group_backends()
    if tensor.device.type in served:
        return tensor.contiguous()
    first = next(iter(served))
    return tensor.to(torch.device(first, torch.get_device_module(first).current_device())).contiguous()
