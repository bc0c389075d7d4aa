"""Collections: lists, tuples and dicts of loaders, and how to tell them from lists of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from trainwright.data.transfer import with_values

LOOKED_AT = 100
"""Items of a list that are searched for a loader: a list of batches may be long."""


class LoaderGroup:
    """The kind of a CombinedLoader."""


def is_collection(loader: Any) -> bool:
    """Return whether this is a collection of loaders: a dict, or a list or tuple that holds a DataLoader."""
    return isinstance(loader, Mapping) or (isinstance(loader, (list, tuple)) and holds_loader(loader))


def holds_loader(value: Any) -> bool:
    """Return whether this is a DataLoader or a CombinedLoader, or lists, tuples and dicts with one in them."""
    if isinstance(value, (DataLoader, LoaderGroup)):
        return True
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(holds_loader(each) for each in islice(value, LOOKED_AT))


def leaves(collection: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each loader of a collection, in order, with the keys that lead to it, joined by "/"."""
    is_mapping = isinstance(collection, Mapping)
    pairs: Iterable[tuple[Any, Any]] = collection.items() if is_mapping else enumerate(collection)
    for key, value in pairs:
        path = f"{name}/{key}" if name else str(key)
        if is_collection(value):
            yield from leaves(value, path)
        else:
            yield path, value


def is_flat(collection: Any) -> bool:
    """Return whether a collection holds only loaders and no further collection."""
    return not any(is_collection(each) for each in _values(collection))


def rebuilt(collection: Any, batches: Iterator[Any], *, flat: bool = False) -> Any:
    """Return a collection's structure with the next batch for each loader; `flat` if it `is_flat`."""
    if flat:
        built = [next(batches) for _ in range(len(collection))]
    else:
        built = [rebuilt(each, batches) if is_collection(each) else next(batches) for each in _values(collection)]
    if isinstance(collection, Mapping):
        mapped = dict(zip(collection, built, strict=True))
        return with_values(collection, mapped) if isinstance(collection, MutableMapping) else mapped
    if hasattr(collection, "_fields"):
        return type(collection)(*built)
    return tuple(built) if isinstance(collection, tuple) else built


def _values(collection: Any) -> Iterable[Any]:
    values: Iterable[Any] = collection.values() if isinstance(collection, Mapping) else collection
    return values
