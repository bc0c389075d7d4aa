"""torch's compiler, imported when something is compiled or asks for it, and not by the first optimizer.

torch's optimizers, DDP and FSDP import `torch._dynamo` so that it does not compile them, even in runs that compile nothing:
a second of each process and 85 MiB. Until something is compiled, a module stands in for it that answers these calls; every
other use of it imports the compiler.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
_CONFIG = f"{NAME}.config"
_USED_AT_ONCE = ("torch.distributed.fsdp.", "torch.utils.checkpoint")
"""Modules of torch that disable a function before each call of it."""


class _StandIn(ModuleType):
    """A module of the compiler before it is imported: some functions, and the real module's attributes otherwise."""

    def __init__(self, name: str, **functions: Any) -> None:
        super().__init__(name)
        spec = ModuleSpec(name, None, is_package=True)  # `importlib.util.find_spec` returns it
        vars(self).update(functions, __spec__=spec, __path__=[])  # where only `_Submodules` finds anything

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of those who look through all modules, such as `inspect`
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if f"{self.__name__}.{name}" == _CONFIG:
            return importlib.import_module(_CONFIG)
        _load()
        return getattr(importlib.import_module(self.__name__), name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the compiler before one of its modules; its configuration needs no other module."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{NAME}.") or not _is_deferred():
            return None
        if name == _CONFIG:
            return PathFinder.find_spec(name, [str(Path(each, "_dynamo")) for each in sys.modules["torch"].__path__])
        _load()
        if name not in sys.modules:
            return importlib.util.find_spec(name)
        # The compiler has imported it by now, and to import it again would make a second module.
        return ModuleSpec(name, self, loader_state=sys.modules[name].__spec__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def defer() -> None:
    """Put the import of the compiler off, unless it is imported, or is part of a bundle, whose finder comes first."""
    if NAME not in sys.modules and not getattr(sys, "frozen", False):
        sys.modules[NAME] = _STAND_IN
        sys.meta_path.append(_Submodules())


def _is_deferred() -> bool:
    return sys.modules.get(NAME) is _STAND_IN


def _load() -> Any:
    torch = vars(importlib.import_module("torch"))
    with _LOCK:
        if _is_deferred():
            del sys.modules[NAME]
            if torch.get("_dynamo") is _STAND_IN:
                del torch["_dynamo"]
            for function in _KEPT:  # torch asks again for those
                for name in [name for name, value in vars(function).items() if value is function]:
                    delattr(function, name)
            _KEPT.clear()
    return importlib.import_module(NAME)


def _graph_break(msg: str = "") -> None:
    if _is_deferred():
        vars(sys.modules["torch"]).setdefault("_dynamo", _STAND_IN)  # or torch would import it by name each time
    else:
        _load().graph_break(msg)


def _disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    """Return the function itself if it is torch's; to disable another one, import the compiler."""
    is_kept = options.get("wrapping") is False  # by torch, in an attribute of the function
    is_used_at_once = getattr(fn, "__module__", "").startswith(_USED_AT_ONCE)
    if not _is_deferred() or not (is_kept or is_used_at_once):
        return _load().disable(fn, recursive, **options)
    if is_kept:
        _KEPT.append(fn)
    return fn


def _get_optimize_ddp_mode() -> str:
    is_default = importlib.import_module(_CONFIG).optimize_ddp is True
    return "ddp_optimizer" if is_default else _load().utils.get_optimize_ddp_mode()


def _clear_lru_cache() -> None:
    if not _is_deferred():
        _load().trace_rules.clear_lru_cache()


_LOCK = threading.Lock()
_KEPT: list[Callable[..., Any]] = []
"""The functions of torch that hold themselves, as `_disable` returned them."""
_STAND_IN = _StandIn(
    NAME,
    graph_break=_graph_break,
    disable=_disable,
    utils=_StandIn(f"{NAME}.utils", get_optimize_ddp_mode=_get_optimize_ddp_mode),
    trace_rules=_StandIn(f"{NAME}.trace_rules", clear_lru_cache=_clear_lru_cache),
)
