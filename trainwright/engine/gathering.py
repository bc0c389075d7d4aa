"""Gathering: nested structures of tensors, numbers and plain data of all ranks, joined or reduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from trainwright.checkpoint.codec import decode, encode
from trainwright.data.transfer import with_values

Exchange = Callable[[Any], list[Any]]
"""Returns the values of all ranks for this rank's, by rank: `Ranks.exchange`."""
REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
}


def gather(value: Any, join: Callable[[Tensor], Tensor], sizes: Sequence[int] | None, exchange: Exchange) -> Any:
    """Return a nested structure with what all ranks have in each place, rank by rank.

    Tensors are joined by `join`. A list of plain data is joined item by item, as is a tuple of numbers and texts; a number
    or a text becomes a list with one item a rank. `sizes` is how many items to take of each rank's; None is all of them.

    Raises:
        TypeError: something else stands in the structure; it is named.
        ValueError: on every rank alike, where the ranks' plain data stand in different places.
    """
    found = _Leaves("gather", lambda each: _is_item(each) or (isinstance(each, (list, tuple)) and _is_flat(each)))
    found.look(value, "the value")
    parts = _exchanged(found, exchange)
    tensors = iter([join(each) for each in found.tensors])
    joined: list[Any] = []
    for own, ranks in zip(found.plain, parts, strict=True):
        if _is_item(own):
            joined.append(list(ranks))
            continue
        kept = ranks if sizes is None else [part[:size] for part, size in zip(ranks, sizes, strict=True)]
        items = [item for part in kept for item in part]
        joined.append(tuple(items) if isinstance(own, tuple) else items)
    return _rebuilt(value, found.takes, tensors, iter(joined))


def reduce(value: Any, reduction: str, reduce_tensor: Callable[[Tensor], Tensor], exchange: Exchange) -> Any:
    """Return a nested structure with the sum, mean, min or max over the ranks of each tensor and each number.

    Raises:
        TypeError: something else stands in the structure; it is named.
        ValueError: the reduction is unknown; or, on every rank alike, the ranks' numbers stand in different places.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown; choose from {', '.join(REDUCTIONS)}.")
    found = _Leaves("reduce", lambda each: _is_item(each) and not isinstance(each, (str, bytes)))
    found.look(value, "the value")
    reduced = [REDUCTIONS[reduction](ranks) for ranks in _exchanged(found, exchange)]
    tensors = iter([reduce_tensor(each) for each in found.tensors])
    return _rebuilt(value, found.takes, tensors, iter(reduced))


class _Leaves:
    """What stands in a nested structure, in the order in which it is walked.

    Args:
        call: the name of the call, for its errors.
        takes: whether a value is one piece of plain data.
    """

    def __init__(self, call: str, takes: Callable[[Any], bool]) -> None:
        self.call, self.takes = call, takes
        self.tensors: list[Tensor] = []
        self.plain: list[Any] = []
        self.places: list[str] = []

    def look(self, value: Any, place: str) -> None:
        """Note the leaves of a value."""
        if value is None:
            return
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif self.takes(value):
            self.plain.append(value)
            self.places.append(place)
        elif isinstance(value, Mapping):
            for key, each in value.items():
                self.look(each, f"{place}[{key!r}]")
        elif isinstance(value, (list, tuple)):
            for index, each in enumerate(value):
                self.look(each, f"{place}[{index}]")
        else:
            accepted = {
                "gather": "tensors, numbers, texts, lists of plain data",
                "reduce": "tensors, numbers",
            }[self.call]
            raise TypeError(
                f"{self.call} was given a {type(value).__name__} ({place}); accepted are {accepted}, and lists, tuples and "
                "dicts of these."
            )


def _exchanged(found: _Leaves, exchange: Exchange) -> list[list[Any]]:
    """Return, for each piece of plain data, those of all ranks. Nothing is sent where there is none."""
    if not found.plain:
        return []
    try:
        plain, tensors = encode(found.plain, found.call)
    except TypeError as error:
        raise TypeError(f"{found.call}: {error}") from None
    if tensors:
        raise TypeError(f"{found.call} was given arrays within a list; accepted are plain data there. Gather tensors.")
    received = exchange([found.places, plain])
    for rank, (places, _) in enumerate(received):
        if places != received[0][0]:
            raise ValueError(
                f"{found.call} was given other structures on rank {rank} than on rank 0: plain data stands at {places[:5]} "
                f"and at {received[0][0][:5]}. Give the same structure on every rank."
            )
    decoded = [decode(plain, {}) for _, plain in received]
    return [list(ranks) for ranks in zip(*decoded, strict=True)]


def _rebuilt(value: Any, takes: Callable[[Any], bool], tensors: Any, plain: Any) -> Any:
    """Return the structure with the next of the results in the place of each leaf."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return next(tensors)
    if takes(value):
        return next(plain)
    if isinstance(value, Mapping):
        return with_values(value, {key: _rebuilt(each, takes, tensors, plain) for key, each in value.items()})
    built = [_rebuilt(each, takes, tensors, plain) for each in value]
    return type(value)(*built) if hasattr(value, "_fields") else type(value)(built)


def _is_item(value: Any) -> bool:
    """Return whether this is one number or one text."""
    if isinstance(value, (bool, int, float, str, bytes)):
        return True
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item")


def _is_flat(value: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether a list holds plain data alone, or a tuple numbers and texts alone."""
    if isinstance(value, tuple):
        return not hasattr(value, "_fields") and all(_is_item(each) for each in value)
    return not _holds_tensor(value)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensor(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensor(each) for each in value)
    return isinstance(value, Tensor)
