"""The combined loader: several loaders as one, which a user makes and may iterate; combined.py shards it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sized
from itertools import count, islice
from typing import Any, Literal, NoReturn

from torch import Tensor
from torch.utils.data import DataLoader

from trainwright.data.stateful_iterable import END
from trainwright.data.transfer import with_values
from trainwright.errors import a_type_of

Combination = Literal["min_size", "max_size", "max_size_cycle", "sequential"]
COMBINATIONS = ("min_size", "max_size", "max_size_cycle", "sequential")
LIMITS = (
    "a CombinedLoader has no limits; pass limit_train_batches= or limit_val_batches= to the Trainer, or shorter loaders, such "
    "as those of torch's Subset."
)
LOOKED_AT = 100
"""Items of a list that are searched for a loader: a list of batches may be long."""


class CombinedLoader:
    """Several iterables of batches as one; iterating yields (batch, batch_idx, dataloader_idx).

    A batch has the structure of `iterables`, with a batch of each iterable; under "sequential" it is a batch of one iterable.

    Args:
        iterables: a list, tuple or dict of DataLoaders or other iterables of batches, which may be nested. A list or tuple
            within it that holds no DataLoader is one iterable of batches.
        mode: "min_size" ends with the shortest; "max_size" ends with the longest, with None for the exhausted ones;
            "max_size_cycle" restarts the shorter ones; "sequential" reads one after the other.

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
        # Found once, because looking for inner collections again at each batch would be slow.
        self._is_flat = self._is_collection and not any(map(is_collection, _values(iterables)))
        named = list(leaves(iterables)) if self._is_collection else [("", iterables)]
        if not named:
            raise ValueError(f"CombinedLoader got an empty {type(iterables).__name__}; pass at least one loader.")
        for name, leaf in named:
            _check_leaf(name, leaf)
        self.flattened = [leaf for _, leaf in named]
        """The iterables in a flat list."""
        self.names = [name or None for name, _ in named] if isinstance(iterables, Mapping) else [None] * len(named)
        """For each of `flattened`, the keys that lead to it, joined by "/"; None if the collection is not a dict."""

    @property
    def limits(self) -> NoReturn:
        """Lightning's numbers of batches by loader, which are settings of the Trainer here (AttributeError)."""
        raise AttributeError(LIMITS)

    @limits.setter
    def limits(self, limits: Any) -> NoReturn:
        raise AttributeError(LIMITS)

    def rebuilt(self, batches: list[Any]) -> Any:
        """Return the batches, one for each of `flattened`, in the structure of the collection."""
        if not self._is_collection:
            return batches[0]
        return _with_items(self.iterables, batches) if self._is_flat else _rebuilt(self.iterables, iter(batches))

    def __len__(self) -> int:
        """Return how many batches an iteration yields; TypeError if an iterable has no length."""
        return combined_length([len(each) for each in self.flattened], self.mode)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        if self.mode == "sequential":
            for index, iterable in enumerate(self.flattened):
                for number, batch in enumerate(iterable):
                    yield batch, number, index
            return
        iterators = [iter(each) for each in self.flattened]
        fresh = set(range(len(iterators)))
        """The iterables that are in their first pass."""
        for number in count():
            batches = [next(each, END) for each in iterators]
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
                            "an iterable yielded no batches when it was restarted; pass one that has data and whose __iter__ "
                            "starts from the beginning."
                        )
                    batches[index] = first
            yield self.rebuilt(batches), number, 0


def is_collection(loader: Any) -> bool:
    """Return whether this is a collection of loaders: a dict, or a list or tuple that holds a DataLoader or an iterator."""
    return isinstance(loader, Mapping) or (isinstance(loader, (list, tuple)) and holds_loader(loader))


def holds_loader(value: Any) -> bool:
    """Return whether this is a DataLoader, a CombinedLoader or an iterator, or lists, tuples and dicts with one in them."""
    if isinstance(value, (DataLoader, CombinedLoader, Iterator)):
        return True
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(holds_loader(each) for each in islice(value, LOOKED_AT))


def is_read_once(loader: Any) -> bool:
    """Return whether a loader is an iterator that cannot start again."""
    # One with a length is a loader whose __iter__ resets it and returns it, as NVIDIA DALI's, unless it is torch's.
    return isinstance(loader, Iterator) and (
        not isinstance(loader, Sized) or type(loader).__module__.startswith("torch.")
    )


def leaves(collection: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each loader of a collection, in order, with the keys that lead to it, joined by "/"."""
    for key, value in collection.items() if isinstance(collection, Mapping) else enumerate(collection):
        path = f"{name}/{key}" if name else str(key)
        if is_collection(value):
            yield from leaves(value, path)
        else:
            yield path, value


def _rebuilt(collection: Any, batches: Iterator[Any]) -> Any:
    items = [_rebuilt(each, batches) if is_collection(each) else next(batches) for each in _values(collection)]
    return _with_items(collection, items)


def _with_items(collection: Any, items: list[Any]) -> Any:
    """Return a collection of the same structure with other items."""
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
        raise TypeError(f"{subject} is a CombinedLoader, which cannot be combined again; pass its loaders themselves.")
    if isinstance(leaf, (str, bytes, Tensor)) or not isinstance(leaf, Iterable):
        raise TypeError(
            f"{subject} is {a_type_of(leaf)}; expected DataLoaders or other iterables of batches, in lists, tuples "
            "or dicts."
        )
