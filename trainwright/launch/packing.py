"""Packing of work for another process of the same user with cloudpickle, and the name of a part that cannot be packed."""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import torch

ADVICE = (
    "cloudpickle has to copy it, so no open files, locks, connections or generators. Make it where it is used (in setup(), in "
    "a hook, at the first __getitem__), or leave it out in __getstate__; a plain script needs no copy."
)


def pack(path: Path, work: Mapping[str, Any], asked: str) -> None:
    """Write work to a file (TypeError with the place of a part that cannot be copied)."""
    try:
        write(path, work)
    except Exception as error:
        culprits = (_find_culprit(name, value) for name, value in work.items())
        if (culprit := next(filter(None, culprits), None)) is None:  # the disk may be full
            raise
        text = f"{asked} runs in new processes, and {culprit[0]} cannot be copied to them: {culprit[1]}. {ADVICE}"
        raise TypeError(text) from error


def write(path: str | Path, value: Any) -> None:
    torch.save(value, path, pickle_module=cloudpickle, pickle_protocol=5)


def unpack(path: Path) -> Any:
    """Read the file of `pack`, onto the CPU. It is trusted: another process of this user wrote it."""
    return torch.load(path, map_location="cpu", weights_only=False)


def write_result(path: Path, result: Any) -> None:
    torch.save(result, path)


def read_result(path: Path) -> Any:
    """Read plain data and tensors, onto the CPU. Other objects are rejected."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _find_culprit(where: str, value: Any, depth: int = 5) -> tuple[str, str] | None:
    """Return where a part is that cannot be packed, with its type, and why; None if all can. `depth` limits the names."""
    try:
        write(os.devnull, value)
    except Exception as error:  # whatever an object's __reduce__ or __getstate__ raises
        inner = (_find_culprit(where + name, part, depth - 1) for name, part in _parts(value).items() if depth)
        reason = str(error).rstrip(".") or type(error).__name__
        return next(filter(None, inner), (f"{where} ({type(value).__name__})", reason))
    return None


def _parts(value: Any) -> dict[str, Any]:
    """Return the parts of an object, with their names."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": item for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"[{number}]": item for number, item in enumerate(value)}
    if isinstance(value, types.FunctionType):
        closure = inspect.getclosurevars(value)
        return {f", its variable {name!r}": item for name, item in {**closure.nonlocals, **closure.globals}.items()}
    attributes = dict(getattr(value, "__dict__", {}))
    if attributes and isinstance(state := value.__getstate__(), Mapping):
        attributes = dict(state)
    attributes |= attributes.pop("_modules", {})
    # Public names first: the user knows them, and private ones of a library often lead to the same object.
    return {f".{name}": attributes[name] for name in sorted(attributes, key=lambda name: name.startswith("_"))}
