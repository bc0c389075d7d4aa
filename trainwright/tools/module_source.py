"""Module source: makes the module of a script or a Python module on the meta device, which allocates nothing."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainwright.errors import a_type_of, did_you_mean


def make_module(target: str, arguments: str | None) -> tuple[nn.Module, str]:
    """Return the module of SCRIPT_OR_MODULE[:CLASS] on the meta device, and its name.

    Args:
        target: a script or a module, and the class, the function without arguments or the instance in it. The name may be
            omitted if only one class of a torch module is defined.
        arguments: the constructor's arguments, an object in JSON.

    Raises:
        ValueError: it does not exist or cannot be made. The message says what to pass.
    """
    origin, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    with _arguments_of(origin):
        return _made(origin, name, arguments)


@contextlib.contextmanager
def _arguments_of(origin: str) -> Iterator[None]:
    """Set `sys.argv` as if the script ran without arguments, since it may parse them at import."""
    before = list(sys.argv)
    sys.argv[:] = [origin]
    try:
        yield
    finally:
        sys.argv[:] = before


def _made(origin: str, name: str, arguments: str | None) -> tuple[nn.Module, str]:
    source = _imported(origin)
    target, name = _find(source, origin, name)
    if isinstance(target, nn.Module):
        if arguments is not None:
            raise ValueError(f"--args {arguments} was passed, but {name} is a module already. Omit --args.")
        return _on_meta(target), name
    options = _options(arguments)
    try:
        with torch.device("meta"):
            module = target(**options)
            if callable(configure := getattr(module, "configure_model", None)):
                configure()
    except TypeError as error:  # most often, of an argument that is missing or unknown
        raise ValueError(
            f"{name} cannot be called with --args {json.dumps(options)} ({error}). Pass all of its arguments, such as "
            "'{\"width\": 512}', or name a function that returns the module and needs none."
        ) from error
    except OSError as error:
        raise ValueError(
            f"{name} cannot be made in {os.getcwd()}: {error}. Run the command where its files are."
        ) from error
    except Exception as error:
        raise ValueError(
            f"{name} cannot be made on the meta device, whose tensors have no values ({type(error).__name__}: {error}). Its "
            "constructor must not read data or values. Read data in setup() or in the loaders, and pass sizes that depend on "
            "data as arguments (--args), or name a function that does. Or use --params."
        ) from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"{name} returned {a_type_of(module)}; name a torch module, or a function that returns one.")
    return _on_meta(module), name


def _on_meta(module: nn.Module) -> nn.Module:
    """Return a copy on the meta device. `to` would copy a tensor twice if two layers share it."""
    tensors: dict[int, Any] = {}
    for tensor in (each for each in chain(module.parameters(), module.buffers()) if not is_lazy(each)):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        tensors[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(module, tensors)


def _imported(origin: str) -> ModuleType:
    is_script = origin.endswith(".py") or os.sep in origin or os.path.exists(origin)
    if is_script and not os.path.isfile(origin):
        raise ValueError(f"the script {origin!r} does not exist; pass the path of a .py file, or the name of a module.")
    sys.path.insert(0, os.path.dirname(os.path.abspath(origin)) if is_script else os.getcwd())
    if not is_script and _spec_of(origin) is None:
        raise ValueError(
            f"neither a script nor a module {origin!r} was found. Pass the path of a .py file, or the name of a module. Models "
            "of a hub are not fetched: name a function that returns one, or pass --params."
        )
    try:
        if not is_script:
            return importlib.import_module(origin)
        # Under another name, since a module of its name may exist.
        spec = importlib.util.spec_from_file_location(f"estimated_{os.path.basename(origin)[:-3]}", origin)
        if spec is None or spec.loader is None:
            raise ValueError(f"{origin!r} is not a Python script. Pass the path of a .py file.")
        source = importlib.util.module_from_spec(spec)
        sys.modules[source.__name__] = source
        spec.loader.exec_module(source)
        return source
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"the import of {origin} failed ({type(error).__name__}: {error}). Put its work under "
            "`if __name__ == '__main__':`, or name another file."
        ) from error


def _spec_of(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the package before the last dot
        return None


def _find(source: ModuleType, origin: str, name: str) -> tuple[Any, str]:
    """Return the object of a name in a module, by default the only class of a torch module."""
    classes = {
        key: value
        for key, value in vars(source).items()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == source.__name__
    }
    listed = ", ".join(classes) or "no class of a torch module"
    if name:
        if name not in vars(source):
            raise ValueError(f"{origin} has no {name!r}. It defines {listed}.{did_you_mean(name, vars(source))}")
        return vars(source)[name], name
    if len(classes) != 1:
        raise ValueError(f"{origin} defines {listed}; add the class, or a function that returns it: {origin}:NAME.")
    return next((value, key) for key, value in classes.items())


def _options(arguments: str | None) -> dict[str, Any]:
    try:
        options = json.loads(arguments or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"--args {arguments} is not JSON ({error}). Pass one such as '{{\"width\": 512}}'.") from error
    if not isinstance(options, dict):
        raise ValueError(f"--args {arguments} is not an object. Pass one such as '{{\"width\": 512}}'.")
    return options
