"""The combined loader: several loaders as one, for users to make and iterate. combined.py shards it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sized
from itertools import count, islice
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import DataLoader

from trainwright.data.stateful_iterable import END
from trainwright.errors import a_type_of
from trainwright.value_kinds import with_values

Combination = Literal["min_size", "max_size", "max_size_cycle", "sequential"]
COMBINATIONS = ("min_size", "max_size", "max_size_cycle", "sequential")
LOOKED_AT = 100
"""Items of a list to search for a loader, because a list of batches may be long."""


class CombinedLoader:
    """Several iterables of batches as one. Iterating yields (batch, batch_idx, dataloader_idx).

    A batch has the structure of `iterables`, with one batch per iterable. Under "sequential" it is a batch of one iterable.

    Args:
        iterables: a list, tuple or dict of DataLoaders or other iterables of batches, which may be nested. A list or tuple
            in it without a DataLoader is one iterable of batches.
        mode: "min_size" ends with the shortest iterable. "max_size" ends with the longest, and has None for exhausted
            iterables. "max_size_cycle" restarts the shorter iterables. "sequential" reads one iterable after the other, and
            is for evaluations only.

    Raises:
        TypeError: something in the collection is not an iterable of batches.
        ValueError: an unknown mode, or an empty collection.

    >>> [batch for batch, _, _ in tw.CombinedLoader({"a": [1, 2, 3], "b": [4, 5]}, mode="max_size_cycle")]
    [{'a': 1, 'b': 4}, {'a': 2, 'b': 5}, {'a': 3, 'b': 4}]
    """

    def __init__(self, iterables: Any, mode: Combination = "min_size") -> None:
        if mode not in COMBINATIONS:
            raise ValueError(f"mode={mode!r} is unknown; choose from {', '.join(COMBINATIONS)}.")
        self.iterables, self.mode = iterables, mode
        self._is_collection = isinstance(iterables, (Mapping, list, tuple))
        # Searching for inner collections again at every batch would be slow.
        self._is_flat = self._is_collection and not any(map(is_collection, _values(iterables)))
        named = list(leaves(iterables)) if self._is_collection else [("", iterables)]
        if not named:
            raise ValueError(f"CombinedLoader got an empty {type(iterables).__name__}. Pass at least one loader.")
        for name, leaf in named:
            _check_leaf(name, leaf)
        self.flattened = [leaf for _, leaf in named]
        """The iterables in a flat list."""
        self.names = [name or None for name, _ in named] if isinstance(iterables, Mapping) else [None] * len(named)
        """The keys that lead to the iterables in `flattened`, joined by "/", or None if the collection is not a dict."""

    def rebuilt(self, batches: list[Any]) -> Any:
        """Return the batches, one per iterable in `flattened`, in the structure of the collection."""
        if not self._is_collection:
            return batches[0]
        return _with_items(self.iterables, batches) if self._is_flat else _rebuilt(self.iterables, iter(batches))

    def __len__(self) -> int:
        """Return how many batches an iteration yields, or raise TypeError if an iterable has no length."""
        return combined_length([len(iterable) for iterable in self.flattened], self.mode)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        if self.mode == "sequential":
            for index, iterable in enumerate(self.flattened):
                for number, batch in enumerate(iterable):
                    yield batch, number, index
            return
        iterators = [iter(iterable) for iterable in self.flattened]
        fresh = set(range(len(iterators)))
        """The iterables in their first pass."""
        for number in count():
            batches = [next(iterator, END) for iterator in iterators]
            ended = [index for index, batch in enumerate(batches) if batch is END]
            fresh.difference_update(ended)
            if not fresh or (ended and self.mode == "min_size"):
                return
            for index in ended:
                batches[index] = None
                if self.mode == "max_size_cycle":
                    iterators[index] = iter(self.flattened[index])
                    if (first := next(iterators[index], END)) is END:
                        raise RuntimeError(
                            "an iterable yielded no batches when it was restarted. Pass an iterable with data whose "
                            "__iter__ starts from the beginning."
                        )
                    batches[index] = first
            yield self.rebuilt(batches), number, 0


def is_collection(loader: Any) -> bool:
    """Return whether this is a collection of loaders: a dict, or a list or tuple with a DataLoader or an iterator in it."""
    return isinstance(loader, Mapping) or (isinstance(loader, (list, tuple)) and holds_loader(loader))


def holds_loader(value: Any) -> bool:
    """Return whether this is, or contains, a DataLoader, a CombinedLoader or an iterator."""
    if isinstance(value, (DataLoader, CombinedLoader, Iterator)):
        return True
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(holds_loader(item) for item in islice(value, LOOKED_AT))


def is_read_once(item: Any) -> bool:
    """Return whether a loader is an iterator that cannot start again."""
    # An iterator with a length, except torch's, is a loader whose __iter__ resets it and returns it, like NVIDIA DALI's.
    return isinstance(item, Iterator) and (not isinstance(item, Sized) or type(item).__module__.startswith("torch."))


def leaves(collection: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the loaders of a collection in order, with the keys that lead to them, joined by "/"."""
    for key, value in collection.items() if isinstance(collection, Mapping) else enumerate(collection):
        path = f"{name}/{key}" if name else str(key)
        if is_collection(value):
            yield from leaves(value, path)
        else:
            yield path, value


def _rebuilt(collection: Any, batches: Iterator[Any]) -> Any:
    items = [_rebuilt(value, batches) if is_collection(value) else next(batches) for value in _values(collection)]
    return _with_items(collection, items)


def _with_items(collection: Any, items: list[Any]) -> Any:
    if isinstance(collection, Mapping):
        mapped = dict(zip(collection, items, strict=True))
        return with_values(collection, mapped) if isinstance(collection, MutableMapping) else mapped
    if hasattr(collection, "_fields"):
        return type(collection)(*items)
    return tuple(items) if isinstance(collection, tuple) else items


def _values(collection: Any) -> Iterable[Any]:
    values: Iterable[Any] = collection.values() if isinstance(collection, Mapping) else collection
    return values


def combined_length(lengths: list[int], mode: Combination) -> int:
    if mode == "sequential":
        return sum(lengths)
    return min(lengths) if mode == "min_size" else max(lengths)


def _check_leaf(name: str, leaf: Any) -> None:
    subject = f"the collection's {name!r}" if name else "iterables"
    if isinstance(leaf, CombinedLoader):
        raise TypeError(f"{subject} is a CombinedLoader, which cannot be combined again. Pass its loaders instead.")
    if isinstance(leaf, (str, bytes, Tensor)) or not isinstance(leaf, Iterable):
        raise TypeError(f"{subject} is {a_type_of(leaf)}. Pass DataLoaders or iterables, in lists, tuples or dicts.")
