"""Typed plain data: Python values to JSON and back; tensors are kept apart.

JSON's own types are written unchanged. Anything else is an object with one key that starts with `$` and names its type. The
types are the tables in this file, so decoding imports nothing and calls nothing that the data names.

Some values come back as a plainer type: a defaultdict with a factory that is not in this file as a dict, a Parameter as a
tensor, and every path as a pathlib.Path.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import enum
import json
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from trainwright.checkpoint.tensors import RankPart
from trainwright.errors import CheckpointError, a_type_of, with_article

MAX_DEPTH = 64
ACCEPTED = (
    "None, bool, int, float, str, bytes, list, tuple, dict, set, frozenset, tensors, numpy arrays and scalars, "
    "torch.Size, torch.dtype, torch.device, pathlib.Path and datetime.timedelta"
)
REMEDY = (
    "Let the state_dict or hook that returned it return plain data instead (numbers, a dict, its own state_dict()), or "
    "leave it out."
)
_TORCH_DTYPES = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_NUMPY_SCALARS = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)
_JSON_INTEGERS = 1 << 63


def encode(value: Any, name: str = "state") -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the value as plain JSON-able data, and its tensors by name; TypeError says what in it is not accepted."""
    encoder = _Encoder()
    return encoder.encode(value, name, 0), encoder.tensors


def encode_stored(value: Any, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Encode a value for a checkpoint; CheckpointError says what in it a checkpoint cannot store."""
    try:
        return encode(value, name)
    except TypeError as error:
        raise CheckpointError(f"{error} {REMEDY}") from error


def decode(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that `encode` was called with; CheckpointError if the data was not written by `encode`."""
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
"""The subclasses of dict that are restored as such."""
_COLLECTIONS = {"$tuple": tuple, "$size": torch.Size, "$set": set, "$frozenset": frozenset}


def _tag_of(value: dict[Any, Any]) -> str:
    """Return the tag of a dict's subclass; empty for a plain dict."""
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
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            # In hex, since Python neither writes nor reads decimal numbers of more than 4,300 digits.
            return value if -_JSON_INTEGERS <= value < _JSON_INTEGERS else {"$int": hex(value)}
        if kind is float:
            # JSON has neither nan nor infinity, and a reader of the file refuses Python's words for them.
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is list:
            return self._items(value, path, depth)
        if kind is dict:
            return self._dict(value, path, depth)
        if kind in (OrderedDict, defaultdict, Counter):
            encoded = self._dict(value, path, depth)
            tag = _tag_of(value)
            return {tag: encoded} if tag else encoded
        if kind in (tuple, torch.Size):
            return {"$tuple" if kind is tuple else "$size": self._items(value, path, depth)}
        if kind in (set, frozenset):
            members = [self.encode(member, f"{path}{{{index}}}", depth + 1) for index, member in enumerate(value)]
            # Sorted, since each process iterates a set in a different order, and one state is to give the same bytes.
            return {f"${kind.__name__}": sorted(members, key=json.dumps)}
        if kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return {"$tensor": self._set_aside(value, path)}
        return self._leaf(value, path)

    def _items(self, value: list[Any] | tuple[Any, ...], path: str, depth: int) -> list[Any]:
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
            raise TypeError(f"{path} is the enum member {value!s}; store its .value or .name, and rebuild it on load.")
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
                f"{path} is, or was computed of, this rank's part of {value.source.name!r}, which other ranks hold the rest "
                "of; put it into the state_dict, where each rank's part is stored."
            )
        kind = type(value)
        parted = " Of a sharded one that is its full_tensor()." if kind.__qualname__ == "DTensor" else ""
        named = with_article(f"{kind.__module__}.{kind.__qualname__}")
        raise TypeError(f"{path} is {named}; expected {ACCEPTED}.{parted}")

    def _numpy(self, value: Any, path: str) -> Any:
        import numpy

        if isinstance(value, numpy.generic) and value.dtype.name in _NUMPY_SCALARS:
            return {"$numpy": [value.dtype.name, self.encode(value.item(), path, 0)]}
        if type(value) is numpy.ndarray and (value.dtype.name in _NUMPY_SCALARS or value.dtype == numpy.complex64):
            # Torch takes the machine's byte order only, and warns of memory that it may not write to.
            copied = numpy.array(value, dtype=value.dtype.newbyteorder("="), order="C", copy=True)
            return {"$array": self._set_aside(torch.from_numpy(copied), path)}
        dtype = getattr(value, "dtype", None)
        raise TypeError(
            f"{path} is a numpy.{type(value).__name__} of {dtype}; stored are numbers and bool up to 64 bits."
        )

    def _set_aside(self, tensor: torch.Tensor, path: str) -> str:
        key = path
        # Two paths may have one spelling: {"a.b": tensor} and {"a": {"b": tensor}}.
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
            if depth < MAX_DEPTH and _are_plain_integers(plain):
                return plain
            return [self.decode(item, depth + 1) for item in plain]
        if not isinstance(plain, dict):
            return plain
        tag = next(iter(plain), "")
        if not tag.startswith("$"):
            return {key: self.decode(item, depth + 1) for key, item in plain.items()}
        content = plain[tag]
        if len(plain) > 1:
            raise CheckpointError(f"the checkpoint's plain data has further keys next to the type {tag!r}.")
        if tag in self._leaves:
            return self._leaves[tag](content)
        if tag in _COLLECTIONS:
            return _COLLECTIONS[tag](self.decode(_expect(content, list), depth))
        if tag in _DICTS:
            return _DICTS[tag](_expect(self.decode(content, depth + 1), dict))
        if tag == "$dict":
            pairs = [_expect(pair, list, 2) for pair in _expect(content, list)]
            return {self.decode(key, depth + 1): self.decode(item, depth + 1) for key, item in pairs}
        raise CheckpointError(f"the checkpoint's plain data has a type {tag!r} that this version does not know.")

    def _numpy(self, name: Any, value: Any) -> Any:
        import numpy

        if name not in _NUMPY_SCALARS:
            raise ValueError(f"{name!r} is not a numpy type of the format")
        # [()] makes a scalar of an array without dimensions.
        return numpy.array(self.decode(value, MAX_DEPTH - 1), dtype=name)[()]


def _are_plain_integers(values: Sequence[Any]) -> bool:
    """Return whether all items are ints that JSON stores unchanged; one check of a long list replaces a call per item."""
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
