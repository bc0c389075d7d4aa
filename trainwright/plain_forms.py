"""Plain forms: values that are no plain data (an enum's member, a dataclass, a class by its name), as plain data and back.

`describe` makes the form that a checkpoint stores, `rebuild` the value of it. A form may name a class or a function; `Names`
looks such a name up among what is imported already, and only where it may stand. Nothing is imported at a file's word, but
omegaconf, for what it made.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Form = dict[str, Any]
LEFT_OUT = "left_out"
"""The form of a value that has none; it says of what kind it is."""
MAX_DEPTH = 32
NAMESPACES: dict[str, type[Any]] = {"namespace": argparse.Namespace, "simple_namespace": types.SimpleNamespace}
CONSTRUCTED: dict[str, Callable[..., Any]] = {"range": range, "slice": slice, "complex": complex}


def describe(value: Any, is_plain: Callable[[Any], bool], depth: int = 0) -> Form:
    """Return the plain form of a value.

    Raises:
        TypeError: it has none, or something in it has none.
    """
    if depth > MAX_DEPTH:
        raise TypeError(f"it is nested deeper than {MAX_DEPTH} levels, or contains itself")
    inner = functools.partial(describe, is_plain=is_plain, depth=depth + 1)
    kind = type(value)
    if isinstance(value, enum.Enum):
        return {"form": "enum", "path": path_of(kind), "value": inner(value.value)}
    if is_plain(value):
        return {"form": "plain", "value": value}
    if kind in NAMESPACES.values():
        name = next(name for name, each in NAMESPACES.items() if each is kind)
        return {"form": name, "items": {key: inner(each) for key, each in vars(value).items()}}
    if (
        isinstance(value, dict)
        and kind.__name__ in ("dict", "AttributeDict")
        and all(type(key) is str for key in value)
    ):
        return {"form": "dict", "items": {key: inner(each) for key, each in value.items()}}
    if kind in (list, tuple):
        return {"form": kind.__name__, "items": [inner(each) for each in value]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"form": "namedtuple", "path": path_of(kind), "items": [inner(each) for each in value]}
    if isinstance(value, (range, slice)):
        return {"form": kind.__name__, "items": [inner(each) for each in (value.start, value.stop, value.step)]}
    if kind is complex:
        return {"form": "complex", "items": [inner(value.real), inner(value.imag)]}
    if isinstance(value, functools.partial):
        call = {"function": inner(value.func), "args": [inner(each) for each in value.args]}
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
    """Refuse a dataclass that its own fields would construct with other values, in its __post_init__, say (TypeError)."""
    fields, kind = dataclasses.fields(value), type(value)
    again = kind(**{each.name: getattr(value, each.name) for each in fields if each.init})
    for each in fields:
        was, now = getattr(value, each.name, None), getattr(again, each.name, None)
        if (each.init or is_plain(was)) and not is_same(was, now):
            raise TypeError(f"a {kind.__qualname__} constructed of its fields has another {each.name}")


def is_same(left: Any, right: Any) -> bool:
    """Return whether two values are of one type and equal, as far as they can tell."""
    try:
        return left is right or (type(left) is type(right) and bool(left == right))
    except (RuntimeError, ValueError):  # tensors and arrays of several elements have no truth
        return False


def readable(form: Form) -> Any:
    """Return what a logger shows of a form: plain data, with names in place of classes, functions and members."""
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
        return {"partial": readable(form["function"]), **{key: readable(each) for key, each in form["items"].items()}}
    if isinstance(items, dict):
        return {key: readable(each) for key, each in items.items()}
    if kind in CONSTRUCTED:
        return repr(CONSTRUCTED[kind](*(readable(each) for each in form["items"])))
    return [readable(each) for each in form["items"]]


def rebuild(form: Form, find: Callable[[str], Any]) -> Any:
    """Return the value of a form; `find` looks a name up.

    Raises:
        LookupError: a name that is not found, or may not stand there.
        ValueError, TypeError, KeyError: the form is not one that `describe` makes, or its class has changed.
    """
    kind, items = form["form"], form.get("items", [])
    again = functools.partial(rebuild, find=find)
    if kind == "plain":
        return form["value"]
    if kind == "name":
        return find(form["path"])
    if kind == "omegaconf":
        from omegaconf import OmegaConf

        return OmegaConf.create(again(form["content"]))
    if kind == "partial":
        keywords = {key: again(each) for key, each in form["items"].items()}
        return functools.partial(again(form["function"]), *(again(each) for each in form["args"]), **keywords)
    if kind in ("enum", "config"):
        cls = _class_of(form, find)
        return cls(again(form["value"])) if kind == "enum" else cls.from_dict(again(form["content"]))
    is_named = isinstance(items, dict)
    values: Any = {key: again(each) for key, each in items.items()} if is_named else [again(each) for each in items]
    if kind == "dict":
        return values
    if kind in ("list", "tuple"):
        return tuple(values) if kind == "tuple" else values
    if kind in NAMESPACES:
        return NAMESPACES[kind](**values)
    if kind in CONSTRUCTED:
        return CONSTRUCTED[kind](*values)
    if kind == "dataclass":
        return _class_of(form, find)(**values)
    if kind == "namedtuple":
        return _class_of(form, find)(*values)
    raise ValueError(f"a form {kind!r} that this version does not know")


KINDS: dict[str, Callable[[Any], bool]] = {
    "enum": lambda cls: issubclass(cls, enum.Enum),
    "dataclass": dataclasses.is_dataclass,
    "namedtuple": lambda cls: issubclass(cls, tuple) and hasattr(cls, "_fields"),
    "config": lambda cls: callable(getattr(cls, "from_dict", None)),
}
"""What a form's class has to be."""


def _class_of(form: Form, find: Callable[[str], Any]) -> Any:
    cls = find(form["path"])
    if not isinstance(cls, type) or not KINDS[form["form"]](cls):
        raise LookupError(f"{form['path']} is no {form['form']}")
    return cls


def path_of(value: Any) -> str:
    """Return where a class or function is found, as "module:name".

    Raises:
        TypeError: it is not found there (a lambda, or one made within a function).
    """
    path = _own_path(value)
    with suppress(LookupError):
        if look_up(path) is value:
            return path
    raise TypeError(f"{value!r:.80} is not found as {path}; a class or a function is stored by its name in its module")


def _own_path(value: Any) -> str:
    name = getattr(value, "__name__", "")
    if inspect.isbuiltin(value) and getattr(torch, name, None) is value:
        return f"torch:{name}"  # their qualified name is of a private class
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"


def look_up(path: str) -> Any:
    """Return the class or function of that name among the modules that are imported.

    Raises:
        LookupError: there is none, or it belongs to another module, which has only been imported there.
    """
    module, _, names = path.partition(":")
    found: Any = sys.modules.get(module)
    if found is None:
        raise LookupError(f"{module} is not imported")
    for name in names.split("."):
        found = getattr(found, name, None)
    if not (isinstance(found, type) or inspect.isroutine(found)) or _own_path(found) != path:
        raise LookupError(f"{module} has no class or function {names} of its own")
    return found


class Names:
    """Looks up the names in a checkpoint's forms, for one class that is constructed from it.

    What may stand there: what belongs to the package of the class; torch's modules, optimizers, schedulers and functions of
    tensors; the types that the constructor's annotations and defaults name; what `torch.serialization.add_safe_globals` was
    given. A form that names a dataclass or an enum of these constructs it.

    Args:
        cls: the class.
    """

    def __init__(self, cls: type[Any]) -> None:
        self._cls = cls
        self._packages = {each.__module__.split(".")[0] for each in cls.__mro__} - {"builtins", "torch", "trainwright"}

    def find(self, path: str) -> Any:
        """Return what has this name.

        Raises:
            LookupError: it is not imported, or may not stand in a checkpoint.
        """
        if path.startswith("__main__:"):  # of the script that trained; this one imports it, perhaps
            with suppress(LookupError):
                return look_up(f"{self._cls.__module__}:{path.partition(':')[2]}")
        found = look_up(path)
        if not (
            path.split(":")[0].split(".")[0] in self._packages or _is_of_torch(found, path) or self._is_known(found)
        ):
            raise LookupError(f"{path} belongs neither to torch nor to the package of {self._cls.__name__}")
        return found

    def _is_known(self, found: Any) -> bool:
        safe = [each[0] if isinstance(each, tuple) else each for each in torch.serialization.get_safe_globals()]
        if any(found is each for each in safe):
            return True
        known: list[Any] = []
        for each in inspect.signature(self._cls).parameters.values():
            known += [each.default, type(each.default)]
        with suppress(Exception):  # annotations may name what is not there
            for hint in typing.get_type_hints(self._cls.__init__).values():
                known += [hint, *typing.get_args(hint)]
        return isinstance(found, type) and any(found is each for each in known)


def _is_of_torch(found: Any, path: str) -> bool:
    module = path.partition(":")[0]
    if module.split(".")[0] != "torch":
        return False
    if isinstance(found, type):
        return issubclass(found, (nn.Module, Optimizer, LRScheduler, enum.Enum))
    if module in ("torch", "torch._C._nn"):  # functions of tensors are built in; all that runs files is not
        return inspect.isbuiltin(found) and found.__name__ != "from_file"
    return module in ("torch.nn.functional", "torch.nn.init")


def left_out_form(value: Any) -> Form:
    """Return the form of a value that has none."""
    kind = type(value)
    return {"form": LEFT_OUT, "kind": f"{kind.__module__}.{kind.__qualname__}"}


def is_form(value: Any) -> bool:
    """Return whether a value read from a file looks like a form."""
    return isinstance(value, Mapping) and isinstance(value.get("form"), str)
