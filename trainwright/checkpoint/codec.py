"""Typed plain data: converts Python values to JSON and back. Tensors are stored separately.

JSON's types are written unchanged. Any other value is an object with one key that starts with `$` and names its type. This
file's tables list all types. So decoding imports nothing and calls nothing that the data names.

Some values are restored as a plainer type. A defaultdict whose factory is not in this file becomes a dict, a Parameter
becomes a tensor, and every path becomes a pathlib.Path.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import datetime
import enum
import gc
import json
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from trainwright.checkpoint.tensors import RankPart
from trainwright.errors import CheckpointError, a_type_of, with_article

__all__ = ["decode", "encode"]

MAX_DEPTH = 64
ACCEPTED = (
    "None, bool, int, float, str, bytes, list, tuple, dict, set, frozenset, tensors, numpy arrays and scalars, "
    "torch.Size, torch.dtype, torch.device, pathlib.Path and datetime.timedelta"
)
REMEDY = (
    "Change the state_dict or hook that returned it: return plain data instead (numbers, a dict, the object's state_dict()), "
    "or remove it."
)
_TORCH_DTYPES = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_NUMPY_SCALARS = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)
_JSON_INTEGERS = 1 << 63
MOST_EQUAL_HASHES = 100
"""How many keys may have one hash. Each is compared with all others, so that 50,000 such integers took half a minute."""
LEAST_SHARED = 1_000_000  # items that any pickle may have by sharing
_UNCHANGED = (type(None), bool, str)


def encode(value: Any, name: str = "state") -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the value as plain JSON-able data, and its tensors by name. TypeError names a value that is not accepted."""
    encoder = _Encoder()
    return encoder.encode(value, name, 0), encoder.tensors


def encode_stored(value: Any, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Encode a value for a checkpoint. CheckpointError names a value that a checkpoint cannot store."""
    try:
        return encode(value, name)
    except TypeError as error:
        raise CheckpointError(f"{error} {REMEDY}") from error


def decode(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that `encode` encoded. CheckpointError if `encode` did not write the data."""
    try:
        return _Decoder(tensors).decode(plain, 0)
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError, binascii.Error) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the checkpoint's plain data is not valid: {type(error).__name__}: {error}") from error


_DICTS: dict[str, Callable[[dict[Any, Any]], Any]] = {"$counter": Counter, "$ordered": OrderedDict} | {
    f"$default_{factory.__name__}": partial(defaultdict, factory)
    for factory in (int, float, list, dict, set, bool, str, tuple)
}
"""The subclasses of dict that keep their type."""
_COLLECTIONS = {"$tuple": tuple, "$size": torch.Size, "$set": set, "$frozenset": frozenset}
_COLLECTION_TAGS: dict[type[Any], str] = {kind: tag for tag, kind in _COLLECTIONS.items()}


def _tag_of(value: dict[Any, Any]) -> str:
    """Return the tag of a dict's subclass, or an empty text for a plain dict."""
    if isinstance(value, defaultdict):
        tag = f"$default_{getattr(value.default_factory, '__name__', '')}"
        return tag if tag in _DICTS and value.default_factory is _DICTS[tag].args[0] else ""  # type: ignore[attr-defined]
    return {Counter: "$counter", OrderedDict: "$ordered"}.get(type(value), "")


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise TypeError(f"{path[:200]} is nested deeper than {MAX_DEPTH} levels, or contains itself.")
        # The exact type: a subclass (a named tuple, an IntEnum) would come back as the class that it derives from.
        kind = type(value)
        if kind in _UNCHANGED:
            return value
        if kind is int:
            # In hex, because Python neither writes nor reads decimal numbers of more than 4,300 digits.
            return value if -_JSON_INTEGERS <= value < _JSON_INTEGERS else {"$int": hex(value)}
        if kind is float:
            # JSON has neither nan nor infinity, and readers reject Python's words for them.
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is list:
            return self._items(value, path, depth)
        if kind is dict:
            return self._dict(value, path, depth)
        if kind in (OrderedDict, defaultdict, Counter):
            encoded, tag = self._dict(value, path, depth), _tag_of(value)
            return {tag: encoded} if tag else encoded
        if kind in _COLLECTION_TAGS:
            items = self._items(list(value), path, depth)
            # Sorted, because processes iterate a set in different orders, but equal states must have equal bytes.
            return {_COLLECTION_TAGS[kind]: sorted(items, key=json.dumps) if kind in (set, frozenset) else items}
        if kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return {"$tensor": self._store(value, path)}
        return self._leaf(value, path)

    def _items(self, value: list[Any], path: str, depth: int) -> list[Any]:
        if depth < MAX_DEPTH and _are_plain_integers(value):
            return list(value)
        return [self.encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        # A key that begins with $ would be read as the name of a type.
        plain = {*map(type, value)} <= {str} and "$" not in {key[:1] for key in value}
        pairs = []
        for key, item in value.items():
            where = f"{path}.{key}" if type(key) is str else f"{path}[{key!r:.40}]"
            encoded = key if plain else self.encode(key, f"the key {key!r:.40} of {path}", depth + 1)
            if isinstance(key, torch.Tensor):
                raise TypeError(f"a key of {path} is a tensor; keys are plain values.")
            pairs.append([encoded, self.encode(item, where, depth + 1)])
        return dict(pairs) if plain else {"$dict": pairs}

    def _leaf(self, value: Any, path: str) -> Any:
        if isinstance(value, enum.Enum):
            raise TypeError(f"{path} is the enum member {value!s}. Store its .value or .name, and rebuild it on load.")
        if type(value) is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if isinstance(value, pathlib.PurePath):
            return {"$path": str(value)}
        if type(value) is datetime.timedelta:
            return {"$timedelta": [value.days, value.seconds, value.microseconds]}
        if type(value).__module__ == "numpy":
            return self._numpy(value, path)
        if isinstance(value, RankPart):
            raise TypeError(
                f"{path} is (or is derived from) this rank's shard of {value.source.name!r}. Put it into the state_dict, "
                "where the shards of all ranks are stored."
            )
        kind = type(value)
        hint = " Store its full_tensor()." if kind.__qualname__ == "DTensor" else ""
        named = with_article(f"{kind.__module__}.{kind.__qualname__}")
        raise TypeError(f"{path} is {named}; expected {ACCEPTED}.{hint}")

    def _numpy(self, value: Any, path: str) -> Any:
        import numpy

        if isinstance(value, numpy.generic) and value.dtype.name in _NUMPY_SCALARS:
            return {"$numpy": [value.dtype.name, self.encode(value.item(), path, 0)]}
        if type(value) is numpy.ndarray and (value.dtype.name in _NUMPY_SCALARS or value.dtype == numpy.complex64):
            # torch accepts only the machine's byte order, and warns of memory that is read-only.
            copied = numpy.array(value, dtype=value.dtype.newbyteorder("="), order="C", copy=True)
            return {"$array": self._store(torch.from_numpy(copied), path)}
        dtype = getattr(value, "dtype", None)
        raise TypeError(
            f"{path} is a numpy.{type(value).__name__} of {dtype}; a checkpoint stores numbers and bool up to 64 bits."
        )

    def _store(self, tensor: torch.Tensor, path: str) -> str:
        key = path
        # Two paths may have the same spelling: {"a.b": tensor} and {"a": {"b": tensor}}.
        while key in self.tensors:
            key += "+"
        self.tensors[key] = tensor.detach()
        return key


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._leaves: dict[str, Callable[[Any], Any]] = {
            "$int": lambda text: int(_expect(text, str), 16),
            "$float": _special_float,
            "$bytes": lambda text: base64.b64decode(_expect(text, str), validate=True),
            "$dtype": lambda text: _TORCH_DTYPES[text],
            "$device": lambda text: torch.device(_expect(text, str)),
            "$path": lambda text: pathlib.Path(_expect(text, str)),
            "$timedelta": lambda parts: datetime.timedelta(*(_expect(part, int) for part in _expect(parts, list, 3))),
            "$tensor": lambda key: self._tensors[key],
            "$array": lambda key: self._tensors[key].numpy(),
            "$numpy": lambda parts: self._numpy(*_expect(parts, list, 2)),
        }

    def decode(self, plain: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CheckpointError(f"the checkpoint's plain data is nested deeper than {MAX_DEPTH} levels.")
        if isinstance(plain, list):
            if depth < MAX_DEPTH and not {list, dict} & {*map(type, plain)}:
                return plain  # a call per number or text would take most of the time
            return [self.decode(item, depth + 1) for item in plain]
        if not isinstance(plain, dict):
            return plain
        tag = next(iter(plain), "")
        if not tag.startswith("$"):
            return {key: self.decode(item, depth + 1) for key, item in plain.items()}
        content = plain[tag]
        if len(plain) > 1:
            raise CheckpointError(f"the checkpoint's plain data has other keys next to the type {tag!r}.")
        if tag in self._leaves:
            return self._leaves[tag](content)
        if tag in _COLLECTIONS:
            items = self.decode(_expect(content, list), depth)
            return _COLLECTIONS[tag](check_hashes(items) if tag in ("$set", "$frozenset") else items)
        if tag in _DICTS:
            return _DICTS[tag](_expect(self.decode(content, depth + 1), dict))
        if tag == "$dict":
            pairs = list(self._pairs(_expect(content, list), depth + 1))
            check_hashes([key for key, _ in pairs])
            return dict(pairs)
        raise CheckpointError(f"the checkpoint's plain data has a type {tag!r} that this version does not know.")

    def _pairs(self, pairs: list[Any], depth: int) -> Iterator[tuple[Any, Any]]:
        for pair in pairs:
            key, item = _expect(pair, list, 2)
            yield self.decode(key, depth), self.decode(item, depth)

    def _numpy(self, name: Any, value: Any) -> Any:
        import numpy

        if name not in _NUMPY_SCALARS:
            raise ValueError(f"{name!r} is not a numpy type of the format")
        # [()] turns an array without dimensions into a scalar.
        return numpy.array(self.decode(value, MAX_DEPTH - 1), dtype=name)[()]


def _are_plain_integers(values: Sequence[Any]) -> bool:
    """Return whether all items are ints that JSON stores unchanged. One check of a long list replaces a call per item."""
    if {*map(type, values)} != {int}:
        return False
    return bool(min(values) >= -_JSON_INTEGERS and max(values) < _JSON_INTEGERS)


def _expect(value: Any, kind: type[Any], length: int | None = None) -> Any:
    if type(value) is not kind or (length is not None and len(value) != length):
        raise ValueError(f"found {a_type_of(value)} where {with_article(kind.__name__)} was expected")
    return value


def _special_float(text: Any) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"{text!r} is not a special float")
    return float(text)


# -- limits that keep the time and memory of a load in proportion to the bytes of a checkpoint ---------------------------


def check_hashes(keys: list[Any]) -> list[Any]:
    """Return the keys of a set or a dict, or raise ValueError if too many have the same hash."""
    if len(keys) > MOST_EQUAL_HASHES and max(Counter(map(hash, keys)).values()) > MOST_EQUAL_HASHES:
        raise ValueError(f"more than {MOST_EQUAL_HASHES} keys of a dict or a set have the same hash")
    return keys


def check_sharing(content: Any) -> None:
    """Reject a pickle whose lists contain each other many times: 2 KB of them have more items than any memory holds.

    Raises:
        ValueError: the items, each as often as it is reached, are many more than the stored ones.
    """
    counts: dict[int, int] = {}
    stored = 0

    def count(value: Any) -> int:
        nonlocal stored
        items = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
        if not isinstance(items, (list, tuple, set, frozenset)):
            return 1
        if id(value) not in counts:
            stored += len(items)
            counts[id(value)] = LEAST_SHARED << 32  # until it is known, for a list that contains itself
            counts[id(value)] = 1 + sum(map(count, items))
        return counts[id(value)]

    if count(content) > LEAST_SHARED + 100 * stored:
        raise ValueError("its lists contain each other many times")


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pause the garbage collector, which would look through millions of new lists again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
