"""Plain forms: values that are not plain data (an enum's member, a dataclass, a class by its name), as plain data and back.

`form_of` makes the form that a checkpoint stores, `rebuild` makes the value again. A form may name a class or a function, which
`find` looks up among the modules that are imported already. So a file cannot make this process import anything but omegaconf.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Form = dict[str, Any]
LEFT_OUT = "left_out"
"""The form of a value that has none; it holds the value's type."""
MAX_DEPTH = 32
NAMESPACES: dict[type[Any], str] = {argparse.Namespace: "namespace", types.SimpleNamespace: "simple_namespace"}
STEPS = ("start", "stop", "step")
PARTS: dict[type[Any], tuple[str, ...]] = {range: STEPS, slice: STEPS, complex: ("real", "imag")}
"""Types that are constructed from some of their attributes."""
CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "list": lambda *items: list(items),
    "tuple": lambda *items: items,
    **{name: kind for kind, name in NAMESPACES.items()},
    **{kind.__name__: kind for kind in PARTS},
}
"""What makes the value of a form from its items, if the form names no class."""
CLASSES: dict[str, Callable[[Any], bool]] = {
    "enum": lambda cls: issubclass(cls, enum.Enum),
    "dataclass": dataclasses.is_dataclass,
    "namedtuple": lambda cls: issubclass(cls, tuple) and hasattr(cls, "_fields"),
    "config": lambda cls: callable(getattr(cls, "from_dict", None)),
}
"""Forms that name a class, and what that class must be."""


def form_of(value: Any, is_plain: Callable[[Any], bool]) -> Form:
    """Return the plain form of a value; a form `LEFT_OUT` if it, or something in it, has none."""
    try:
        return _describe(value, is_plain)
    except Exception:  # also what a foreign to_dict raises
        kind = type(value)
        return {"form": LEFT_OUT, "kind": f"{kind.__module__}.{kind.__qualname__}"}


def _describe(value: Any, is_plain: Callable[[Any], bool], depth: int = 0) -> Form:
    if depth > MAX_DEPTH:
        raise TypeError(f"it is nested deeper than {MAX_DEPTH} levels, or contains itself")
    inner = functools.partial(_describe, is_plain=is_plain, depth=depth + 1)
    kind = type(value)
    if isinstance(value, enum.Enum):  # before plain data, since a member of an IntEnum is an int too
        return {"form": "enum", "path": path_of(kind), "value": inner(value.value)}
    if is_plain(value):
        return {"form": "plain", "value": value}
    if kind in NAMESPACES:
        return {"form": NAMESPACES[kind], "items": {key: inner(each) for key, each in vars(value).items()}}
    is_dict = isinstance(value, dict) and kind.__name__ in ("dict", "AttributeDict")
    if is_dict and all(type(key) is str for key in value):
        return {"form": "dict", "items": {key: inner(each) for key, each in value.items()}}
    if kind in (list, tuple):
        return {"form": kind.__name__, "items": [inner(each) for each in value]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"form": "namedtuple", "path": path_of(kind), "items": [inner(each) for each in value]}
    if kind in PARTS:
        return {"form": kind.__name__, "items": [inner(getattr(value, name)) for name in PARTS[kind]]}
    if isinstance(value, functools.partial):
        function, args = value.func, value.args
        if function.__module__.startswith("jsonargparse.") and isinstance(args[-1], type):  # which makes that class
            function, args = args[-1], ()
        call = {"function": inner(function), "args": [inner(each) for each in args]}
        return {"form": "partial", **call, "items": {key: inner(each) for key, each in value.keywords.items()}}
    if isinstance(value, type) or inspect.isroutine(value):
        return {"form": "name", "path": path_of(value)}
    return _describe_object(value, inner, is_plain)


def _describe_object(value: Any, inner: Callable[[Any], Form], is_plain: Callable[[Any], bool]) -> Form:
    kind = type(value)
    if dataclasses.is_dataclass(value):
        fields = {each.name: inner(getattr(value, each.name)) for each in dataclasses.fields(value) if each.init}
        _refuse_changed(value, is_plain)
        return {"form": "dataclass", "path": path_of(kind), "items": fields}
    if kind.__module__.split(".")[0] == "omegaconf" and hasattr(value, "_get_parent"):
        from omegaconf import OmegaConf  # it made the value, so it is there

        is_part = value._get_parent() is not None  # its interpolations may point out of it
        return {"form": "omegaconf", "content": inner(OmegaConf.to_container(value, resolve=is_part))}
    if callable(getattr(value, "to_dict", None)) and callable(getattr(kind, "from_dict", None)):
        content = value.to_dict()
        again = kind.from_dict(content)
        if type(again) is kind and again.to_dict() == content:
            return {"form": "config", "path": path_of(kind), "content": inner(content)}
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__} has no plain form")


def _refuse_changed(value: Any, is_plain: Callable[[Any], bool]) -> None:
    """Refuse a dataclass whose fields would construct another one, for example in its __post_init__ (TypeError)."""
    fields, kind = dataclasses.fields(value), type(value)
    again = kind(**{each.name: getattr(value, each.name) for each in fields if each.init})
    for each in fields:
        was, now = getattr(value, each.name, None), getattr(again, each.name, None)
        if (each.init or is_plain(was)) and not is_same(was, now):
            raise TypeError(f"a {kind.__qualname__} constructed from its fields has another {each.name}")


def is_same(left: Any, right: Any) -> bool:
    """Return whether two values have the same type and compare equal."""
    try:
        return left is right or (type(left) is type(right) and bool(left == right))
    except (RuntimeError, ValueError):  # tensors and arrays of several elements have no truth
        return False


def readable(form: Form) -> Any:
    """Return what a logger shows for a form: plain data, with names for classes, functions and members."""
    kind, items = form["form"], form.get("items", [])
    if kind == "plain":
        return form["value"]
    if kind in ("omegaconf", "config"):
        return readable(form["content"])
    if kind == "enum":
        return f"{form['path'].rpartition('.')[2]}({readable(form['value'])!r})"
    if kind == "name":
        return form["path"].replace(":", ".")
    if kind == "partial":
        return {"partial": readable(form["function"]), **{key: readable(each) for key, each in items.items()}}
    if isinstance(items, dict):
        return {key: readable(each) for key, each in items.items()}
    values = [readable(each) for each in items]
    return repr(CONSTRUCTORS[kind](*values)) if kind in ("range", "slice", "complex") else values


def rebuild(form: Form, cls: type[Any]) -> Any:
    """Return the value of a form, for the constructor of a class.

    Raises:
        LookupError: a name is not found, or not allowed: see `find`.
        ValueError, TypeError, KeyError: the form is malformed, or its class has changed.
    """
    kind, items = form["form"], form.get("items", [])
    again = functools.partial(rebuild, cls=cls)
    if kind == "plain":
        return form["value"]
    if kind == "name":
        return find(form["path"], cls)
    if kind == "omegaconf":
        from omegaconf import OmegaConf

        return OmegaConf.create(again(form["content"]))
    if kind == "partial":
        keywords = {key: again(each) for key, each in items.items()}
        return functools.partial(again(form["function"]), *(again(each) for each in form["args"]), **keywords)
    make = CONSTRUCTORS.get(kind)
    if kind in CLASSES:
        make = find(form["path"], cls)
        if not isinstance(make, type) or not CLASSES[kind](make):
            raise LookupError(f"{form['path']} is not a class of the kind {kind}")
    if make is None:
        raise ValueError(f"a form {kind!r} that this version does not know")
    if kind == "enum":
        return make(again(form["value"]))
    if kind == "config":
        return make.from_dict(again(form["content"]))  # type: ignore[attr-defined]
    if isinstance(items, dict):
        return make(**{key: again(each) for key, each in items.items()})
    return make(*(again(each) for each in items))


def path_of(value: Any) -> str:
    """Return where a class or function is found, as "module:name" (TypeError for a lambda, or one made in a function)."""
    path = _own_path(value)
    with suppress(LookupError):
        if look_up(path) is value:
            return path
    raise TypeError(f"{value!r:.80} is not found as {path}; a class or a function is stored by its name in its module")


def _own_path(value: Any) -> str:
    name = getattr(value, "__name__", "")
    if inspect.isbuiltin(value) and getattr(torch, name, None) is value:
        return f"torch:{name}"  # its __qualname__ has a private class
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"


def look_up(path: str) -> Any:
    """Return the class or function of that name, which an imported module has to define itself (LookupError)."""
    module, _, names = path.partition(":")
    found: Any = sys.modules.get(module)
    if found is None:
        raise LookupError(f"{module} is not imported")
    for name in names.split("."):
        found = getattr(found, name, None)
    if not (isinstance(found, type) or inspect.isroutine(found)) or _own_path(found) != path:
        raise LookupError(f"{module} defines no class or function {names}")
    return found


def find(path: str, cls: type[Any]) -> Any:
    """Return the class or function of this name, from a checkpoint that a class is constructed from.

    Allowed are the package of the class; torch's modules, optimizers, schedulers and functions of tensors; the types in the
    constructor's annotations and defaults; and what `torch.serialization.add_safe_globals` was given.

    Raises:
        LookupError: it is not imported, or not allowed.
    """
    if path.startswith("__main__:"):  # of the training script, which this one may import as a module
        with suppress(LookupError):
            return look_up(f"{cls.__module__}:{path.partition(':')[2]}")
    found = look_up(path)
    packages = {each.__module__.split(".")[0] for each in cls.__mro__} - {"builtins", "torch", "trainwright"}
    if path.split(":")[0].split(".")[0] in packages or _is_of_torch(found, path) or _is_known(found, cls):
        return found
    raise LookupError(f"{path} belongs neither to torch nor to the package of {cls.__name__}")


def _is_known(found: Any, cls: type[Any]) -> bool:
    safe = [each[0] if isinstance(each, tuple) else each for each in torch.serialization.get_safe_globals()]
    if any(found is each for each in safe):
        return True
    known: list[Any] = []
    for each in inspect.signature(cls).parameters.values():
        known += [each.default, type(each.default)]
    with suppress(Exception):  # annotations may name what is not there
        for hint in typing.get_type_hints(cls.__init__).values():
            known += [hint, *typing.get_args(hint)]
    return isinstance(found, type) and any(found is each for each in known)


def _is_of_torch(found: Any, path: str) -> bool:
    module = path.partition(":")[0]
    if module.split(".")[0] != "torch":
        return False
    if isinstance(found, type):
        return issubclass(found, (nn.Module, Optimizer, LRScheduler, enum.Enum))
    if module in ("torch", "torch._C._nn"):  # functions of tensors are built in; the ones that run files are not
        return inspect.isbuiltin(found) and found.__name__ != "from_file"
    return module in ("torch.nn.functional", "torch.nn.init")
