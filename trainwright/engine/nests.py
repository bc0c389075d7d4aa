"""Nested structures over the ranks: tensors and plain data that are gathered, reduced, padded, broadcast or split.

`distributed/collectives.py` does the same for single tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.codec import decode, encode
from trainwright.data.transfer import to_device, with_values
from trainwright.distributed import collectives
from trainwright.distributed.ranks import Ranks
from trainwright.errors import a_type_of

Leaves = list[tuple[str, Any]]
"""The tensors and the pieces of plain data in a structure, with their paths, in the order of the walk."""
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
        ValueError: on every rank, if the ranks have plain data at different paths.
    """

    def joined(local: Any, parts: list[Any]) -> Any:
        parts = _kept(parts, keep)
        if _is_item(local):
            return parts
        items = [item for part in parts for item in part]
        return tuple(items) if isinstance(local, tuple) else items

    leaves = list(_leaves("gather", value))  # the whole list, so that an error comes before any communication
    plain = _exchanged("gather", leaves, ranks)
    structure = zlib.crc32(repr([path for path, leaf in leaves if isinstance(leaf, Tensor)]).encode())
    results = [
        gather_tensor(leaf, keep, structure) if isinstance(leaf, Tensor) else joined(leaf, next(plain))
        for _, leaf in leaves
    ]
    return _rebuilt("gather", value, iter(results))


def gather_tensor(tensor: Tensor, keep: Sequence[bool] | None = None, structure: int = 0) -> Tensor:
    """Return the tensors of all ranks joined along their first dimension; a 0-dim tensor becomes a row. Collective.

    `keep` says which ranks' tensors to keep, by default all. Ranks with different `structure` all raise.
    """
    parts = _kept(collectives.gather_uneven(tensor.reshape(1) if tensor.dim() == 0 else tensor, structure), keep)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def gather_objects(value: Any, keep: Sequence[bool] | None, device: torch.device) -> list[Any]:
    """Return the items of all ranks' lists, rank by rank: plain data and tensors of any shape, not joined. Collective.

    Something that is not a list or a tuple counts as one item.

    Raises:
        TypeError: on every rank, if an item is neither plain data nor a tensor.
    """
    try:
        plain, tensors = encode(list(value) if isinstance(value, (list, tuple)) else [value], "the list")
        answer = {"items": plain}
    except TypeError as error:  # sent too, because the other ranks wait for an answer
        answer, tensors = {"error": str(error)}, {}
    received = collectives.gather_nests(answer, tensors)
    for rank, (answer, _) in enumerate(received):
        if "error" in answer:
            raise TypeError(f"gather of objects, rank {rank}: {answer['error']}")
    decoded = [decode(answer["items"], blobs) for answer, blobs in received]
    return [to_device(item, device) for items in _kept(decoded, keep) for item in items]


def pad(value: Any, dim: int, pad_index: float, pad_first: bool) -> Any:
    """Return a nested structure whose tensors are padded along a dimension to the longest of all ranks. Collective.

    Raises:
        TypeError: the structure contains something else than tensors.
        ValueError: on every rank, if a rank's tensor has a different number of dimensions.
    """
    padded = [_padded(leaf, dim, pad_index, pad_first) for _, leaf in [*_leaves("pad_across_processes", value)]]
    return _rebuilt("pad_across_processes", value, iter(padded))


def _padded(tensor: Tensor, dim: int, pad_index: float, pad_first: bool) -> Tensor:
    shapes = collectives.shapes_of(tensor, "pad_across_processes")
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError(
            f"pad_across_processes got tensors with different numbers of dimensions ({collectives.listed(shapes)}). "
            "Reshape them first."
        )
    if not -tensor.dim() <= dim < tensor.dim():
        return tensor  # such as labels along with logits
    longest, length = max(shape[dim] for shape in shapes), tensor.shape[dim]
    if longest == length:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = longest - length
    padding = tensor.new_full(shape, pad_index)
    return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim)


def _kept(parts: list[Any], keep: Sequence[bool] | None) -> list[Any]:
    """Return the parts of the ranks to keep."""
    return parts if keep is None else [part for part, is_kept in zip(parts, keep, strict=True) if is_kept]


def reduce(value: Any, reduction: str, ranks: Ranks, scale: float = 1.0) -> Any:
    """Return a nested structure with the scaled sum, mean, min or max over the ranks of its tensors and numbers. Collective.

    Raises:
        TypeError: the structure contains something else. The message has its path.
        ValueError: the reduction is unknown. On every rank, if the ranks have numbers or tensors at different paths,
            or tensors of different shapes.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown; choose from {', '.join(REDUCTIONS)}.")
    leaves = list(_leaves("reduce", value))
    plain = _exchanged("reduce", leaves, ranks)
    _check_same_tensors(leaves)
    combine = REDUCTIONS[reduction]
    results = [
        collectives.all_reduce(leaf, reduction) if isinstance(leaf, Tensor) else combine(next(plain))
        for _, leaf in leaves
    ]
    if scale != 1.0:
        results = [result * scale for result in results]
    return _rebuilt("reduce", value, iter(results))


def _check_same_tensors(leaves: Leaves) -> None:
    """Raise ValueError on every rank if the ranks' tensors differ, because a reduction would be wrong or never end."""
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        return
    described = [path for path, _ in tensors], [(tuple(leaf.shape), str(leaf.dtype)) for _, leaf in tensors]
    digests = torch.tensor([zlib.crc32(repr(part).encode()) for part in described])
    received = [digest.tolist() for digest in collectives.all_gather(digests)]
    if others := [rank for rank, (paths, _) in enumerate(received) if paths != received[0][0]]:
        raise ValueError(
            f"reduce was given other tensors on rank(s) {others} than on rank 0; pass the same structure on every rank."
        )
    for path, leaf in tensors if len({shapes for _, shapes in received}) > 1 else ():
        shapes = collectives.shapes_of(leaf, "reduce")
        if len(set(shapes)) > 1:
            raise ValueError(
                f"reduce was given tensors of different shapes ({path}: {collectives.listed(shapes)}). Use "
                "pad_across_processes to make them equal, or gather to join them."
            )


def broadcast(obj: Any, source: int, ranks: Ranks, device: torch.device) -> Any:
    """Return the source's object on every rank: plain data over the store, tensors over the process group. Collective.

    Raises:
        TypeError: on every rank, if it is more than plain data and tensors.
    """
    if not 0 <= source < ranks.world_size:
        raise ValueError(f"src={source} is not a rank; choose from 0 to {ranks.world_size - 1}.")
    if ranks.world_size == 1:
        return obj
    is_source = ranks.rank == source
    message: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    if is_source:
        try:
            plain, tensors = encode(obj, "obj")
            message = {"plain": plain, "tensors": collectives.table_of(tensors)}
        except TypeError as error:  # sent too, because the other ranks wait for an answer
            message = {"error": str(error)}
    received = ranks.exchange(message, f"broadcast from rank {source}")[source]
    if "error" in received:
        raise TypeError(f"broadcast from rank {source}: {received['error']}")
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
    """Return whether this is one number or one text."""
    if isinstance(value, (bool, int, float, str, bytes)):
        return True
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item")


def _is_plain(value: Any) -> bool:
    """Return whether this is one number or text, a tuple of these, or a list without tensors at any depth."""
    if isinstance(value, tuple):
        return not hasattr(value, "_fields") and all(map(_is_item, value))
    return _is_item(value) or (isinstance(value, list) and not _contains_tensor(value))


def _contains_tensor(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_contains_tensor, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, Tensor)


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "gather": ("tensors, numbers, texts, lists of plain data", _is_plain),
    "reduce": ("tensors, numbers", lambda value: _is_item(value) and not isinstance(value, (str, bytes))),
    "pad_across_processes": ("tensors", lambda value: False),
}
"""The types that a call accepts, in words, and a test for its single values of plain data."""


def _leaves(call: str, value: Any, path: str = "the value") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every tensor and every piece of plain data."""
    accepted, is_leaf = KINDS[call]
    if value is None:
        return
    if isinstance(value, Tensor) or is_leaf(value):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, child in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(call, child, f"{path}[{key!r}]")
    else:
        raise TypeError(
            f"{call} was given {a_type_of(value)} ({path}); expected {accepted}, or lists, tuples and dicts of these."
        )


def _rebuilt(call: str, value: Any, results: Iterator[Any]) -> Any:
    """Return the structure with the leaves replaced by the results, in the order of the walk."""
    if value is None:
        return None
    if isinstance(value, Tensor) or KINDS[call][1](value):
        return next(results)
    if isinstance(value, Mapping):
        return with_values(value, {key: _rebuilt(call, child, results) for key, child in value.items()})
    built = [_rebuilt(call, child, results) for child in value]
    return type(value)(*built) if hasattr(value, "_fields") else type(value)(built)


def _exchanged(call: str, leaves: Leaves, ranks: Ranks) -> Iterator[list[Any]]:
    """Yield all ranks' values of every piece of plain data. If there is none, nothing is sent."""
    local = [(path, leaf) for path, leaf in leaves if not isinstance(leaf, Tensor)]
    if not local:
        return iter(())
    reason = ""
    try:
        encoded, tensors = encode([leaf for _, leaf in local], call)
        if tensors:
            reason = f"{call} was given arrays within a list; expected plain data there. Gather tensors."
    except TypeError as error:
        reason = f"{call}: {error}"
    # An error is sent too, because the other ranks wait for an answer. Paths show ranks whose structures differ.
    message = [[path for path, _ in local], None if reason else encoded, reason]
    received = ranks.exchange(message, f"{call} of plain data")
    if reason := next((error for *_, error in received if error), ""):
        raise TypeError(reason)
    first = received[0][0]
    for rank, (paths, *_) in enumerate(received):
        if paths != first:
            raise ValueError(
                f"{call} was given different structures: rank 0 has plain data at {first[:5]}, rank {rank} at {paths[:5]}. "
                "Pass the same structure on every rank."
            )
    decoded = [decode(plain, {}) for _, plain, _ in received]
    return iter([list(values) for values in zip(*decoded, strict=True)])
