"""Nested structures over the ranks: tensors and plain data that are gathered, reduced, padded, broadcast or split.

`distributed/collectives.py` does the same for single tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.codec import decode, encode
from trainwright.data.transfer import to_device, with_values
from trainwright.distributed import collectives
from trainwright.distributed.ranks import Ranks
from trainwright.errors import a_type_of

REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
}


def gather(value: Any, ranks: Ranks, keep: Sequence[bool] | None = None) -> Any:
    """Return a nested structure with the values of all ranks, rank by rank, for every leaf. Collective.

    Tensors are joined along their first dimension. A list of plain data and a tuple of numbers and texts are joined item by
    item. A number or a text becomes a list with one item per rank. `keep` says which ranks' values to keep, by default all.

    Raises:
        TypeError: the structure contains something else. The message has its path.
    """

    def joined(local: Any, parts: list[Any]) -> Any:
        parts = _kept(parts, keep)
        if not isinstance(local, (list, tuple)):
            return parts
        items = [item for part in parts for item in part]
        return tuple(items) if isinstance(local, tuple) else items

    leaves = list(_leaves(value, _is_joined))
    plain = _exchanged("gather", leaves, ranks)  # first, so that an error comes before the other collectives
    results = [gather_tensor(leaf, keep) if isinstance(leaf, Tensor) else joined(leaf, next(plain)) for leaf in leaves]
    return _rebuilt(value, _is_joined, iter(results))


def gather_tensor(tensor: Tensor, keep: Sequence[bool] | None = None) -> Tensor:
    """Return the tensors of all ranks joined along their first dimension; a 0-dim tensor becomes a row. Collective.

    `keep` says which ranks' tensors to keep, by default all.
    """
    parts = _kept(collectives.gather_uneven(tensor.reshape(1) if tensor.dim() == 0 else tensor), keep)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def gather_objects(value: Any, keep: Sequence[bool] | None, device: torch.device) -> list[Any]:
    """Return the items of all ranks' lists, rank by rank: plain data and tensors of any shape, not joined. Collective.

    Something that is not a list or a tuple counts as one item (TypeError if it is neither plain data nor a tensor).
    """
    plain, tensors = encode(list(value) if isinstance(value, (list, tuple)) else [value], "the list of objects")
    received = [decode(items, blobs) for items, blobs in collectives.gather_nests(plain, tensors)]
    return [to_device(item, device) for items in _kept(received, keep) for item in items]


def pad(value: Any, dim: int, pad_index: float, pad_first: bool) -> Any:
    """Return a nested structure whose tensors are padded along a dimension to the longest of all ranks. Collective."""

    def padded(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"pad_across_processes was given {a_type_of(tensor)}; expected tensors, or nests of them.")
        shapes = collectives.shapes_of(tensor, "pad_across_processes")
        if not -tensor.dim() <= dim < tensor.dim():
            return tensor  # such as labels along with logits
        shape = list(tensor.shape)
        shape[dim] = max(other[dim] for other in shapes) - tensor.shape[dim]
        if not shape[dim]:
            return tensor
        padding = tensor.new_full(shape, pad_index)
        return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim)

    return _rebuilt(value, _is_item, iter([padded(leaf) for leaf in _leaves(value, _is_item)]))


def _kept(parts: list[Any], keep: Sequence[bool] | None) -> list[Any]:
    """Return the parts of the ranks to keep."""
    return parts if keep is None else [part for part, is_kept in zip(parts, keep, strict=True) if is_kept]


def reduce(value: Any, reduction: str, ranks: Ranks, scale: float = 1.0) -> Any:
    """Return a nested structure with the scaled sum, mean, min or max over the ranks of its tensors and numbers. Collective.

    Raises:
        TypeError: the structure contains something else.
        ValueError: the reduction is unknown. On every rank, if a tensor has different shapes.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown; choose from {', '.join(REDUCTIONS)}.")

    def reduced(tensor: Tensor) -> Tensor:
        shapes = collectives.shapes_of(tensor, "reduce")
        if len(set(shapes)) > 1:
            raise ValueError(
                f"reduce was given tensors of different shapes ({collectives.listed(shapes)}). Use pad_across_processes to "
                "make them equal, or gather to join them."
            )
        return collectives.all_reduce(tensor, reduction)

    leaves = list(_leaves(value, _is_item))
    plain = _exchanged("reduce", leaves, ranks)
    results = [reduced(leaf) if isinstance(leaf, Tensor) else REDUCTIONS[reduction](next(plain)) for leaf in leaves]
    return _rebuilt(value, _is_item, iter(results if scale == 1.0 else [result * scale for result in results]))


def broadcast(obj: Any, source: int, ranks: Ranks, device: torch.device) -> Any:
    """Return the source's object on every rank: plain data over the store, tensors over the process group. Collective.

    Raises:
        TypeError: on the source, if it is more than plain data and tensors.
    """
    if not 0 <= source < ranks.world_size:
        raise ValueError(f"src={source} is not a rank; choose from 0 to {ranks.world_size - 1}.")
    if ranks.world_size == 1:
        return obj
    is_source = ranks.rank == source
    plain, tensors = encode(obj, "the object to broadcast") if is_source else (None, {})
    message = {"plain": plain, "tensors": collectives.table_of(tensors)}
    received = ranks.exchange(message, f"broadcast from rank {source}")[source]
    sent = collectives.broadcast_tensors(received["tensors"], tensors if is_source else None, source, device)
    return obj if is_source else decode(received["plain"], sent)


def portion(inputs: Any, rank: int, world_size: int, pad: bool) -> Any:
    """Return a rank's contiguous part of a list, a tuple, a tensor, or of every value of a dict. The first parts are longer.

    With `pad`, the last item is repeated until all parts have the same length.

    Raises:
        TypeError, ValueError: inputs that cannot be divided.
    """
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the values to split have different lengths ({lengths}); pass values of the same length.")
        return {key: portion(value, rank, world_size, pad) for key, value in inputs.items()}
    if not isinstance(inputs, (list, tuple, Tensor)):
        raise TypeError(
            f"split_between_processes was given {a_type_of(inputs)}; expected a list, a tuple, a tensor, or a dict "
            "of these."
        )
    size, larger = divmod(len(inputs), world_size)
    start = rank * size + min(rank, larger)
    count = size + (rank < larger)
    if not pad or count == size + (larger > 0):
        return inputs[start : start + count]
    indices = [*range(start, start + count), len(inputs) - 1]
    return inputs[indices] if isinstance(inputs, Tensor) else type(inputs)(inputs[index] for index in indices)


def _is_item(value: Any) -> bool:
    """Return whether this is neither a tensor nor a container."""
    return not isinstance(value, (Tensor, Mapping, list, tuple))


def _is_joined(value: Any) -> bool:
    """Return whether a gather joins this plain value: an item, a tuple of these, or a list without tensors at any depth."""
    if isinstance(value, tuple):
        return not hasattr(value, "_fields") and all(map(_is_item, value))
    return _is_item(value) or (isinstance(value, list) and not _contains_tensor(value))


def _contains_tensor(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_contains_tensor, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, Tensor)


def _leaves(value: Any, is_plain: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield every tensor, and every value that `is_plain` accepts."""
    if isinstance(value, Tensor) or (value is not None and is_plain(value)):
        yield value
    elif value is not None:
        for child in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(child, is_plain)


def _rebuilt(value: Any, is_plain: Callable[[Any], bool], results: Iterator[Any]) -> Any:
    """Return the structure with the leaves replaced by the results, in the order of the walk."""
    if value is None:
        return None
    if isinstance(value, Tensor) or is_plain(value):
        return next(results)
    if isinstance(value, Mapping):
        return with_values(value, {key: _rebuilt(child, is_plain, results) for key, child in value.items()})
    built = [_rebuilt(child, is_plain, results) for child in value]
    return type(value)(*built) if hasattr(value, "_fields") else type(value)(built)


def _exchanged(call: str, leaves: list[Any], ranks: Ranks) -> Iterator[list[Any]]:
    """Yield all ranks' values of every piece of plain data. If there is none, nothing is sent."""
    local = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    if not local:
        return iter(())
    encoded, arrays = encode(local, call)
    if arrays:
        raise TypeError(f"{call} was given numpy arrays; convert them to tensors with torch.from_numpy.")
    received = [decode(values, {}) for values in ranks.exchange(encoded, f"{call} of plain data")]
    return iter([list(values) for values in zip(*received, strict=True)])
