"""Gathering: nested structures of tensors and plain data, joined, reduced, padded, broadcast or split over the ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpoint.codec import decode, encode
from trainwright.data.transfer import to_device, with_values
from trainwright.distributed import collectives
from trainwright.distributed.nests import broadcast_tensors, gather_nests, table_of
from trainwright.distributed.ranks import Ranks
from trainwright.errors import a_type_of

Exchange = Callable[[Any], list[Any]]
"""Returns the values of all ranks for this rank's, by rank: `Ranks.exchange`."""
Leaves = list[tuple[str, Any]]
"""Each tensor and piece of plain data in a structure, with its path there, in the order of the walk."""
ACCEPTED = {
    "gather": "tensors, numbers, texts, lists of plain data",
    "reduce": "tensors, numbers",
    "pad_across_processes": "tensors",
}
REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
}


def gather(value: Any, join: Callable[[Tensor, int], Tensor], keep: Sequence[bool] | None, exchange: Exchange) -> Any:
    """Return a nested structure with the values of all ranks, rank by rank, for each leaf.

    Tensors are joined by `join`, which gets a digest of the structure too. A list of plain data is joined item by item, as is
    a tuple of numbers and texts; a number or a text becomes a list with one item per rank. `keep` is whether to keep each
    rank's; None keeps all.

    Raises:
        TypeError: something else is in the structure; the message has its path.
        ValueError: on every rank, if the ranks have plain data at different paths.
    """

    def joined(own: Any, ranks: list[Any]) -> Any:
        kept = _kept(ranks, keep)
        if _is_item(own):
            return kept
        items = [item for part in kept for item in part]
        return tuple(items) if isinstance(own, tuple) else items

    def takes(each: Any) -> bool:
        return _is_item(each) or (isinstance(each, (list, tuple)) and _is_flat(each))

    leaves = list(_leaves("gather", value, takes))  # all of them, so that a refusal comes before any communication
    plain = _exchanged("gather", leaves, exchange)
    structure = zlib.crc32(repr([path for path, each in leaves if isinstance(each, Tensor)]).encode())
    results = [join(each, structure) if isinstance(each, Tensor) else joined(each, next(plain)) for _, each in leaves]
    return _rebuilt(value, takes, iter(results))


def join(tensor: Tensor, keep: Sequence[bool] | None = None, structure: int = 0) -> Tensor:
    """Return the tensors of all ranks joined along their first dimension; a 0-dim one becomes a row. Collective.

    `keep` is whether to keep each rank's; None keeps all. Ranks with different `structure` all raise.
    """
    parts = _kept(collectives.gather_uneven(tensor.reshape(1) if tensor.dim() == 0 else tensor, structure), keep)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def gather_objects(value: Any, keep: Sequence[bool] | None, device: torch.device) -> list[Any]:
    """Return the items of all ranks' lists, rank by rank: plain data and tensors of any shape, none of them joined.

    Something that is not a list or a tuple counts as one item. Collective.

    Raises:
        TypeError: on every rank, if an item is neither plain data nor a tensor.
    """
    try:
        plain, tensors = encode(list(value) if isinstance(value, (list, tuple)) else [value], "the list")
        own = {"items": plain}
    except TypeError as error:  # an answer too: the other ranks wait for one
        own, tensors = {"error": str(error)}, {}
    received = gather_nests(own, tensors)
    for rank, (answer, _) in enumerate(received):
        if "error" in answer:
            raise TypeError(f"gather of objects, rank {rank}: {answer['error']}")
    decoded = [decode(answer["items"], blobs) for answer, blobs in received]
    return [to_device(item, device) for items in _kept(decoded, keep) for item in items]


def pad(value: Any, dim: int, pad_index: float, pad_first: bool) -> Any:
    """Return a nested structure whose tensors are padded along a dimension to the longest of all ranks. Collective.

    Raises:
        TypeError: something else than tensors is in the structure.
        ValueError: on every rank, if a rank's tensor has a different number of dimensions.
    """
    leaves = list(_leaves("pad_across_processes", value, lambda each: False))
    return _rebuilt(value, lambda each: False, iter([_padded(each, dim, pad_index, pad_first) for _, each in leaves]))


def _padded(tensor: Tensor, dim: int, pad_index: float, pad_first: bool) -> Tensor:
    shapes = collectives.shapes_of(tensor, "pad_across_processes")
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError(
            f"pad_across_processes got tensors with different numbers of dimensions ({collectives.listed(shapes)}); reshape "
            "them first."
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


def reduce(value: Any, reduction: str, reduce_tensor: Callable[[Tensor], Tensor], exchange: Exchange) -> Any:
    """Return a nested structure with the sum, mean, min or max over the ranks of each tensor and each number.

    Raises:
        TypeError: something else is in the structure; the message has its path.
        ValueError: the reduction is unknown; or, on every rank, the ranks have numbers or tensors at different paths,
            or tensors of different shapes.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown; choose from {', '.join(REDUCTIONS)}.")

    def takes(each: Any) -> bool:
        return _is_item(each) and not isinstance(each, (str, bytes))

    leaves = list(_leaves("reduce", value, takes))
    plain = _exchanged("reduce", leaves, exchange)
    combine = REDUCTIONS[reduction]
    _refuse_unlike_tensors(leaves)
    results = [reduce_tensor(each) if isinstance(each, Tensor) else combine(next(plain)) for _, each in leaves]
    return _rebuilt(value, takes, iter(results))


def scaled(value: Any, factor: float) -> Any:
    """Return what `reduce` returned, each number and tensor times a factor."""
    if factor == 1.0:
        return value
    results = [each * factor for _, each in _leaves("reduce", value, _is_item)]
    return _rebuilt(value, _is_item, iter(results))


def _refuse_unlike_tensors(leaves: Leaves) -> None:
    """Raise on every rank if the ranks' tensors differ: a reduction would be wrong on some and never end on others."""
    tensors = [(path, each) for path, each in leaves if isinstance(each, Tensor)]
    if not tensors:
        return
    described = [path for path, _ in tensors], [(tuple(each.shape), str(each.dtype)) for _, each in tensors]
    digests = torch.tensor([zlib.crc32(repr(each).encode()) for each in described])
    received = [each.tolist() for each in collectives.all_gather(digests)]
    if others := [rank for rank, (paths, _) in enumerate(received) if paths != received[0][0]]:
        raise ValueError(
            f"reduce was given other tensors on rank(s) {others} than on rank 0; give the same structure on every rank."
        )
    for path, each in tensors if len({shapes for _, shapes in received}) > 1 else ():
        shapes = collectives.shapes_of(each, "reduce")
        if len(set(shapes)) > 1:
            raise ValueError(
                f"reduce was given tensors of different shapes ({path}: {collectives.listed(shapes)}); "
                "pad_across_processes makes them equal, or gather joins them."
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
    own: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    if is_source:
        # An object that cannot be sent is an answer too: the other ranks wait for one.
        try:
            plain, tensors = encode(obj, "obj")
            own = {"plain": plain, "tensors": table_of(tensors)}
        except TypeError as error:
            own = {"error": str(error)}
    received = ranks.exchange(own, f"broadcast from rank {source}")[source]
    if "error" in received:
        raise TypeError(f"broadcast from rank {source}: {received['error']}")
    sent = broadcast_tensors(received["tensors"], tensors if is_source else None, source, device)
    return obj if is_source else decode(received["plain"], sent)


def portion(inputs: Any, rank: int, world_size: int, pad: bool) -> Any:
    """Return a rank's contiguous part of a list, a tuple, a tensor, or of each value of a dict; the first parts are longer.

    With `pad`, the last item is repeated until all parts have the same length.

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


def _leaves(call: str, value: Any, takes: Callable[[Any], bool], path: str = "the value") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for each tensor, and for each value that `takes` says is one piece of plain data."""
    if value is None:
        return
    if isinstance(value, Tensor) or takes(value):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(call, each, takes, f"{path}[{key!r}]")
    else:
        raise TypeError(
            f"{call} was given {a_type_of(value)} ({path}); expected {ACCEPTED[call]}, or lists, tuples and dicts "
            "of these."
        )


def _exchanged(call: str, leaves: Leaves, exchange: Exchange) -> Iterator[list[Any]]:
    """Return, for each piece of plain data among the leaves, those of all ranks. Without any, nothing is sent."""
    own = [(path, each) for path, each in leaves if not isinstance(each, Tensor)]
    if not own:
        return iter(())
    reason = ""
    try:
        encoded, tensors = encode([each for _, each in own], call)
        if tensors:
            reason = f"{call} was given arrays within a list; expected plain data there. Gather tensors."
    except TypeError as error:
        reason = f"{call}: {error}"
    # A refusal is an answer too, as the other ranks wait for one. Paths show ranks whose structures differ.
    received = exchange([[path for path, _ in own], None if reason else encoded, reason])
    if reason := next((each for *_, each in received if each), ""):
        raise TypeError(reason)
    first = received[0][0]
    for rank, (paths, *_) in enumerate(received):
        if paths != first:
            raise ValueError(
                f"{call} was given different structures: rank 0 has plain data at {first[:5]}, rank {rank} at {paths[:5]}. "
                "Give the same structure on every rank."
            )
    decoded = [decode(plain, {}) for _, plain, _ in received]
    return iter([list(ranks) for ranks in zip(*decoded, strict=True)])


def _rebuilt(value: Any, takes: Callable[[Any], bool], results: Iterator[Any]) -> Any:
    """Return the structure with each leaf replaced by the next result."""
    if value is None:
        return None
    if isinstance(value, Tensor) or takes(value):
        return next(results)
    if isinstance(value, Mapping):
        return with_values(value, {key: _rebuilt(each, takes, results) for key, each in value.items()})
    built = [_rebuilt(each, takes, results) for each in value]
    return type(value)(*built) if hasattr(value, "_fields") else type(value)(built)


def _is_item(value: Any) -> bool:
    """Return whether this is one number or one text."""
    if isinstance(value, (bool, int, float, str, bytes)):
        return True
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item")


def _is_flat(value: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether a list holds no tensor at any depth, or a tuple numbers and texts alone."""
    if isinstance(value, tuple):
        return not hasattr(value, "_fields") and all(_is_item(each) for each in value)
    return not _holds_tensor(value)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(_holds_tensor(each) for each in (value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, Tensor)
