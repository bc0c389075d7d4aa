"""Plain forms: values such as enum members, dataclasses and classes as plain data, which a checkpoint can store.

`form_of` makes a form and `rebuild` makes the value again. A form may name a class or a function, which `find` looks up among
the imported modules. So a file cannot make this process import anything except omegaconf.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["CONTENT", "LEFT_OUT", "readable"]

Form = dict[str, Any]
CONTENT = "<content>"
"""The key, among the forms, of the container whose content the hyper-parameters are."""
LEFT_OUT = "left_out"
"""The form of a value that has no other form. It contains the value's type."""
CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "list": lambda *items: list(items),
    "tuple": lambda *items: items,
    "namespace": argparse.Namespace,
}
"""How the items of a form become a value, if the form names no class."""


def form_of(value: Any, is_plain: Callable[[Any], bool]) -> Form:
    """Return the plain form of a value, which is `LEFT_OUT` if a part of the value has no form."""
    try:
        return _describe(value, is_plain)
    except Exception:  # also from a dataclass's constructor, or a RecursionError
        kind = type(value)
        return {"form": LEFT_OUT, "kind": f"{kind.__module__}.{kind.__qualname__}"}


def _describe(value: Any, is_plain: Callable[[Any], bool]) -> Form:
    inner = functools.partial(_describe, is_plain=is_plain)
    kind = type(value)
    if isinstance(value, enum.Enum):  # before plain data, since a member of an IntEnum is an int too
        return {"form": "enum", "path": path_of(kind), "value": inner(value.value)}
    if is_plain(value):
        return {"form": "plain", "value": value}
    if isinstance(value, type) or inspect.isroutine(value):
        return {"form": "name", "path": path_of(value)}
    if kind in (list, tuple):
        return {"form": kind.__name__, "items": [inner(item) for item in value]}
    if kind.__module__.split(".")[0] == "omegaconf":
        return {"form": "omegaconf", "content": inner(_omegaconf_content(value))}
    form, items = _container(value, inner)
    return {**form, "items": {key: inner(item) for key, item in items.items()}}


def _container(value: Any, inner: Callable[[Any], Form]) -> tuple[Form, Mapping[str, Any]]:
    """Return the form of a container without its named items, and these items (TypeError for any other value)."""
    kind = type(value)
    if isinstance(value, functools.partial):
        function, args = value.func, value.args
        if function.__module__.startswith("jsonargparse.") and isinstance(args[-1], type):  # it makes this class
            function, args = args[-1], ()
        form = {"form": "partial", "function": inner(function), "args": [inner(item) for item in args]}
        return form, value.keywords
    if dataclasses.is_dataclass(value):  # a class has its name above
        if dataclasses.replace(value) != value:  # type: ignore[type-var]
            raise TypeError(f"a {kind.__qualname__} constructed from its fields is another one")
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return {"form": "dataclass", "path": path_of(kind)}, {name: getattr(value, name) for name in names}
    if kind is argparse.Namespace:
        return {"form": "namespace"}, vars(value)
    if kind.__name__ in ("dict", "AttributeDict") and all(type(key) is str for key in value):
        return {"form": "dict"}, value
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__} has no plain form")


def _omegaconf_content(value: Any) -> Any:
    """Return the content with its interpolations, or with their values if they need the rest of the configuration."""
    from omegaconf import OmegaConf  # it made the value, so it is installed
    from omegaconf.errors import OmegaConfBaseException

    content = OmegaConf.to_container(value)
    try:
        OmegaConf.resolve(OmegaConf.create(content))
    except OmegaConfBaseException:
        content = OmegaConf.to_container(value, resolve=True)
    return content


def readable(form: Form) -> Any:
    """Return plain data for the loggers, with names instead of classes, functions and enum members."""
    kind, items = form["form"], form.get("items", [])
    if kind == "plain":
        return form["value"]
    if kind == "omegaconf":
        return readable(form["content"])
    if kind == "enum":
        return f"{form['path'].rpartition('.')[2]}({readable(form['value'])!r})"
    if kind == "name":
        return form["path"].replace(":", ".")
    if isinstance(items, dict):
        function = {"partial": readable(form["function"])} if kind == "partial" else {}
        return function | {key: readable(item) for key, item in items.items()}
    return [readable(item) for item in items]


def rebuild(form: Form, cls: type[Any]) -> Any:
    """Return the value of a form, for the constructor of a class (LookupError for a name that `find` rejects)."""
    kind, items = form["form"], form.get("items", [])
    again = functools.partial(rebuild, cls=cls)
    if kind == "plain":
        return form["value"]
    if kind == "name":
        return find(form["path"], cls)
    if kind == "omegaconf":
        from omegaconf import OmegaConf

        return OmegaConf.create(again(form["content"]))
    make: Any = CONSTRUCTORS.get(kind)
    if kind == "partial":
        make = functools.partial(functools.partial, again(form["function"]), *map(again, form["args"]))
    elif kind in ("enum", "dataclass"):
        make = find(form["path"], cls)
        if not isinstance(make, type) or not (issubclass(make, enum.Enum) or dataclasses.is_dataclass(make)):
            raise LookupError(f"{form['path']} is neither an enum nor a dataclass")
    if make is None:
        raise ValueError(f"a form {kind!r} that this version does not know")
    if kind == "enum":
        return make(again(form["value"]))
    if isinstance(items, dict):
        return make(**{key: again(item) for key, item in items.items()})
    return make(*map(again, items))


def path_of(value: Any) -> str:
    """Return the "module:name" of a class or function. TypeError for a lambda or a local function."""
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
    """Return the class or function of a name, which an imported module must define itself (LookupError)."""
    module, _, names = path.partition(":")
    value: Any = sys.modules.get(module)
    if value is None:
        raise LookupError(f"{module} is not imported")
    for name in names.split("."):
        value = getattr(value, name, None)
    if not (isinstance(value, type) or inspect.isroutine(value)) or _own_path(value) != path:
        raise LookupError(f"{module} defines no class or function {names}")
    return value


def find(path: str, cls: type[Any]) -> Any:
    """Return the class or function of a name in a checkpoint, for the constructor of a class (LookupError if not allowed).

    Allowed are the package of the class, torch's modules, optimizers, schedulers and functions of tensors, the types in the
    constructor's annotations, and everything passed to `torch.serialization.add_safe_globals`.
    """
    if path.startswith("__main__:"):  # of the training script, which this script may import as a module
        with suppress(LookupError):
            return look_up(f"{cls.__module__}:{path.partition(':')[2]}")
    value = look_up(path)
    packages = {base.__module__.split(".")[0] for base in cls.__mro__} - {"builtins", "torch", "trainwright"}
    safe = [entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()]
    with suppress(Exception):  # annotations may contain names that do not exist
        for hint in typing.get_type_hints(cls.__init__).values():
            safe += [hint, *typing.get_args(hint)]
    package = path.partition(":")[0].partition(".")[0]
    if package in packages or _is_of_torch(value, path) or any(value is entry for entry in safe):
        return value
    raise LookupError(f"{path} belongs neither to torch nor to the package of {cls.__name__}")


def _is_of_torch(value: Any, path: str) -> bool:
    module = path.partition(":")[0]
    if not f"{module}.".startswith("torch."):
        return False
    if isinstance(value, type):
        return issubclass(value, (nn.Module, Optimizer, LRScheduler, enum.Enum))
    if module in ("torch.nn.functional", "torch.nn.init"):
        return True
    # Functions of tensors are built in. torch's functions that load files are not, except this one.
    is_function_of_tensors = module == "torch" or getattr(nn.functional, value.__name__, None) is value
    return is_function_of_tensors and inspect.isbuiltin(value) and value.__name__ != "from_file"
