"""Nested structures over the ranks: tensors and plain data that are gathered, reduced, padded, broadcast or split.

`distributed/collectives.py` does the same for single tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress, repeat
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.codec import decode, encode
from trainwright.data.transfer import to_device
from trainwright.distributed import collectives
from trainwright.distributed.ranks import Ranks
from trainwright.errors import a_type_of
from trainwright.value_kinds import with_values

REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
}


def gather(value: Any, keep: Sequence[bool] | None = None) -> Any:
    """Return a nested structure whose tensors have the rows of all ranks, rank by rank. Collective.

    `keep` says which ranks' rows to keep, by default all (TypeError if the structure contains something else).
    """
    leaves = list(leaves_of(value))  # the whole list, so that an error comes before any communication
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"gather was given {a_type_of(leaf)}; expected tensors, or nests of them. Other objects are gathered by "
                "gather_for_metrics(objects, use_gather_object=True)."
            )
    return _rebuilt(value, iter([gather_tensor(leaf, keep) for leaf in leaves]))


def gather_tensor(tensor: Tensor, keep: Sequence[bool] | None = None) -> Tensor:
    """Return the tensors of all ranks joined along their first dimension; a 0-dim tensor becomes a row. Collective.

    `keep` says which ranks' tensors to keep, by default all.
    """
    parts = list(compress(collectives.gather_uneven(tensor if tensor.dim() else tensor[None]), keep or repeat(True)))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def gather_objects(value: Any, keep: Sequence[bool] | None, device: torch.device) -> list[Any]:
    """Return the items of all ranks' lists, rank by rank: plain data and tensors of any shape, not joined. Collective.

    Something that is not a list or a tuple counts as one item (TypeError if it is neither plain data nor a tensor).
    """
    plain, tensors = encode(list(value) if isinstance(value, (list, tuple)) else [value], "the list of objects")
    received = [decode(items, blobs) for items, blobs in collectives.gather_nests(plain, tensors)]
    return [to_device(item, device) for items in compress(received, keep or repeat(True)) for item in items]


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

    return _rebuilt(value, iter([padded(leaf) for leaf in leaves_of(value)]))


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

    leaves = list(leaves_of(value))
    plain = _exchanged(leaves, ranks)
    results = [reduced(leaf) if isinstance(leaf, Tensor) else REDUCTIONS[reduction](next(plain)) for leaf in leaves]
    return _rebuilt(value, iter(results if scale == 1.0 else [result * scale for result in results]))


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


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield every value that is neither a container nor None."""
    if isinstance(value, (Mapping, list, tuple)):
        for child in value.values() if isinstance(value, Mapping) else value:
            yield from leaves_of(child)
    elif value is not None:
        yield value


def _rebuilt(value: Any, results: Iterator[Any]) -> Any:
    """Return the structure with the leaves replaced by the results, in the order of the walk."""
    if isinstance(value, Mapping):
        return with_values(value, {key: _rebuilt(child, results) for key, child in value.items()})
    if isinstance(value, (list, tuple)):
        built = [_rebuilt(child, results) for child in value]
        return type(value)(*built) if hasattr(value, "_fields") else type(value)(built)
    return None if value is None else next(results)


def _exchanged(leaves: list[Any], ranks: Ranks) -> Iterator[list[Any]]:
    """Yield all ranks' values of every number. If there is none, nothing is sent."""
    local = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    for leaf in local:
        if not isinstance(leaf, Real):
            raise TypeError(f"reduce was given {a_type_of(leaf)}; expected tensors and numbers, or nests of them.")
    encoded, _ = encode(local, "reduce")
    received = [decode(values, {}) for values in ranks.exchange(encoded, "reduce of numbers")] if local else [[]]
    if collectives.data_group() is not None:  # one rank of each part of the data
        received = received[:: ranks.world_size // collectives.num_data_ranks()]
    return iter([list(values) for values in zip(*received, strict=True)])
