"""Packing of work for another process of the same user with cloudpickle, and the name of a part that cannot be packed.

Classes and functions that the other process could not import are packed too: from a notebook, from `__main__`, and from
modules that a test runner made.
"""

from __future__ import annotations

import inspect
import io
import sys
import types
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch

DEPTH = 5
"""The number of names in the place of a part that cannot be packed, such as model.encoder.layers[0].lock."""
ADVICE = (
    "cloudpickle has to copy it, so no open files, locks, connections or generators. Make it where it is used (in setup(), in "
    "a hook, at the first __getitem__), or leave it out in __getstate__; a plain script needs no copy."
)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle's pickler, which also packs the contents of modules that a fresh interpreter would not find."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ not in (None, "__main__"):
            module = sys.modules.get(obj.__module__)
            if module is not None and not is_importable(module):
                cloudpickle.register_pickle_by_value(module)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and obj.__module__ == "__main__" and isinstance(reduced, tuple):
            *parts, set_state = reduced
            return (*parts, partial(_set_in_main, set_state))
        return reduced


def _set_in_main(set_state: Callable[[type, Any], Any], kind: type, state: Any) -> None:
    """Fill a class of `__main__` and make it known there: loader workers pickle its instances by its name."""
    set_state(kind, state)
    if "." not in kind.__qualname__:
        setattr(sys.modules["__main__"], kind.__name__, kind)


@cache
def is_importable(module: types.ModuleType) -> bool:
    """Return whether a fresh interpreter with this search path would find this very module."""
    parent = module.__name__.rpartition(".")[0]
    if parent and not (parent in sys.modules and is_importable(sys.modules[parent])):
        return False
    path = getattr(sys.modules[parent], "__path__", None) if parent else None
    # Not importlib.util.find_spec: it returns the spec of a module that is already imported, wherever that came from.
    specs = (finder.find_spec(module.__name__, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    spec, file = next(filter(None, specs), None), getattr(module, "__file__", None)
    return spec is not None and (file is None or spec.origin == file)


def pack(path: Path, work: Mapping[str, Any], asked: str) -> None:
    """Write the work to a file (TypeError with the place of a part that cannot be copied)."""
    registered = cloudpickle.list_registry_pickle_by_value()
    try:
        torch.save(dict(work), path, pickle_module=sys.modules[__name__], pickle_protocol=5)
    except Exception as error:  # whatever an object's __reduce__ or __getstate__ raises
        for name, value in work.items():
            if (reason := _failure(value)) is not None:
                where, culprit, reason = find_culprit(value, name, reason)
                raise TypeError(
                    f"{asked} runs in new processes, and {where} ({type(culprit).__name__}) cannot be copied to them: "
                    f"{reason}. {ADVICE}"
                ) from error
        raise
    finally:
        # The registry belongs to the whole process, which may use cloudpickle itself.
        for name in cloudpickle.list_registry_pickle_by_value() - registered:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])


def unpack(path: Path, *, weights_only: bool = False) -> Any:
    """Read a file of another process of this user, onto the CPU. `weights_only` admits plain data and tensors only."""
    return torch.load(path, map_location="cpu", weights_only=weights_only)


def write_result(path: Path, result: Any) -> None:
    torch.save(result, path)


class _Probe(Pickler):
    """Tries to pack an object without the memory of its tensors."""

    def persistent_id(self, obj: Any) -> Any:
        return "tensor" if isinstance(obj, (torch.TypedStorage, torch.UntypedStorage)) else None


def _failure(value: Any) -> str | None:
    try:
        _Probe(io.BytesIO(), protocol=5).dump(value)
    except Exception as error:
        return str(error).strip().rstrip(".") or type(error).__name__
    return None


def find_culprit(value: Any, where: str, reason: str) -> tuple[str, Any, str]:
    """Return where a part is that cannot be packed, that part, and why."""
    for _ in range(DEPTH):
        for name, part in _parts(value):
            if (failure := _failure(part)) is not None:
                value, where, reason = part, where + name, failure
                break
    return where, value, reason


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of an object, with their names."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{number}]", item) for number, item in enumerate(value)]
    if isinstance(value, types.FunctionType):
        closure = inspect.getclosurevars(value)
        variables = {**closure.nonlocals, **closure.globals}
        return [(f", its variable {name!r}", item) for name, item in variables.items()]
    if isinstance(value, type):
        return [(f".{name}", item) for name, item in vars(value).items()]
    attributes: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    if attributes and isinstance(state := value.__getstate__(), Mapping):
        attributes = dict(state)
    if isinstance(value, torch.nn.Module):
        attributes |= attributes.pop("_modules")
    # Public names first: the user knows them, and private ones of a library often lead to the same object.
    parts = [(f".{name}", attributes[name]) for name in sorted(attributes, key=lambda name: name.startswith("_"))]
    return [*parts, (f", its class {type(value).__name__}", type(value))]
