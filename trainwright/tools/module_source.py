"""Module source: makes the module that a script or a Python module defines, on the meta device, which allocates nothing."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainwright.errors import a_type_of
from trainwright.launch.config import nearest


def make_module(target: str, arguments: str | None) -> tuple[nn.Module, str]:
    """Return the module of SCRIPT_OR_MODULE[:CLASS] on the meta device, and its name.

    Args:
        target: a script or a module, and the class, the function without arguments or the instance in it; without a name,
            the one class of a module that it defines.
        arguments: the constructor's arguments, an object in JSON.

    Raises:
        ValueError: it does not exist or cannot be made; the message has what to pass instead.
    """
    origin, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    with _arguments_of(origin):
        return _made(origin, name, arguments)


@contextlib.contextmanager
def _arguments_of(origin: str) -> Iterator[None]:
    """Set `sys.argv` as if the script ran without arguments, which one that parses them while it is imported reads."""
    before = list(sys.argv)
    sys.argv[:] = [origin]
    try:
        yield
    finally:
        sys.argv[:] = before


def _made(origin: str, name: str, arguments: str | None) -> tuple[nn.Module, str]:
    source = _imported(origin)
    found, name = _find(source, origin, name)
    if isinstance(found, nn.Module):
        if arguments is not None:
            raise ValueError(f"--args {arguments} was given, but {name} is a module that exists already; leave it out.")
        return _on_meta(found), name
    options = _options(arguments)
    _check_call(found, name, options)
    try:
        with torch.device("meta"):
            module = found(**options)
            if callable(configure := getattr(module, "configure_model", None)):
                configure()
    except Exception as error:
        raise ValueError(
            f"{name} cannot be made on the meta device, whose tensors have no values ({type(error).__name__}: {error}); leave "
            "out of its constructor what reads values, or use --params."
        ) from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"{name} gave {a_type_of(module)}; name a torch module, or a function that returns one.")
    return _on_meta(module), name


def _on_meta(module: nn.Module) -> nn.Module:
    """Return a copy on the meta device; `to` would make two tensors of one that two layers hold."""
    tensors: dict[int, Any] = {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
        for each in module.parameters()
        if not is_lazy(each)
    }
    tensors |= {id(each): torch.empty_like(each, device="meta") for each in module.buffers() if not is_lazy(each)}
    return copy.deepcopy(module, tensors)


def _imported(origin: str) -> ModuleType:
    is_script = origin.endswith(".py") or os.sep in origin or os.path.exists(origin)
    if is_script and not os.path.isfile(origin):
        raise ValueError(
            f"{origin!r} is not a script that exists; pass the path of a .py file, or the name of a module."
        )
    sys.path.insert(0, os.path.dirname(os.path.abspath(origin)) if is_script else os.getcwd())
    if not is_script and _spec_of(origin) is None:
        raise ValueError(
            f"neither a script nor a module {origin!r} was found; pass the path of a .py file, or the name of a module. Models "
            "of a hub are not fetched: name a function that returns one, or pass --params."
        )
    try:
        if not is_script:
            return importlib.import_module(origin)
        # Not under its own name, which another module may have.
        spec = importlib.util.spec_from_file_location(f"estimated_{os.path.basename(origin)[:-3]}", origin)
        if spec is None or spec.loader is None:
            raise ValueError(f"{origin!r} is not a Python script; pass the path of a .py file.")
        source = importlib.util.module_from_spec(spec)
        sys.modules[source.__name__] = source
        spec.loader.exec_module(source)
        return source
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{origin} failed while it was imported ({type(error).__name__}: {error}); put its work under "
            "`if __name__ == '__main__':`, or name another file."
        ) from error


def _spec_of(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the package before the last dot
        return None


def _find(source: ModuleType, origin: str, name: str) -> tuple[Any, str]:
    """Return what a name means in a module; without a name, its one class of a torch module."""
    own = {
        key: value
        for key, value in vars(source).items()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == source.__name__
    }
    if name:
        if name not in vars(source):
            found = f"It defines {', '.join(own)}." if own else "It defines no class of a torch module."
            raise ValueError(f"{origin} has no {name!r}. {found}{nearest(name, vars(source))}")
        return vars(source)[name], name
    if len(own) != 1:
        which = f"defines {', '.join(own)}" if own else "defines no class of a torch module"
        raise ValueError(f"{origin} {which}; add the class, or a function that returns the module: {origin}:NAME.")
    return next((value, key) for key, value in own.items())


def _options(arguments: str | None) -> dict[str, Any]:
    try:
        options = json.loads(arguments or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--args {arguments} is not JSON ({error}); pass an object such as '{{\"width\": 512}}'."
        ) from error
    if not isinstance(options, dict):
        raise ValueError(f"--args {arguments} is not an object; pass one such as '{{\"width\": 512}}'.")
    return options


def _check_call(found: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
    """Refuse arguments that a constructor does not take, or needs (ValueError)."""
    if not callable(found):
        raise ValueError(
            f"{name} is {a_type_of(found)}; name a class of a torch module, or a function that returns one."
        )
    if isinstance(found, type) and not issubclass(found, nn.Module):
        raise ValueError(
            f"{name} is a class, but not of a torch module; name one of those, or a function that returns a module."
        )
    signature = inspect.signature(found)
    names = [
        each.name
        for each in signature.parameters.values()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY, each.POSITIONAL_ONLY)
    ]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    if not takes_all and (unknown := next((each for each in options if each not in names), None)) is not None:
        raise ValueError(
            f"{name} takes no {unknown!r} (it was given --args {json.dumps(dict(options))}); it takes "
            f"{', '.join(names) or 'no arguments'}.{nearest(unknown, dict.fromkeys(names))}"
        )
    missing = [
        each for each in names if signature.parameters[each].default is inspect.Parameter.empty and each not in options
    ]
    if missing:
        example = json.dumps(dict.fromkeys(missing, "..."))
        raise ValueError(
            f"{name} needs {', '.join(missing)}; pass them as --args '{example}', or name a function that returns the module "
            "and needs none."
        )
