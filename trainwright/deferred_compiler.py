"""torch's compiler, imported when something is compiled or asks for it, and not by the first optimizer.

torch's optimizers, DDP and FSDP import `torch._dynamo` so that it does not compile them, even in runs that compile nothing:
a second of each process and 60 MiB. So the module is made without its contents, and answers the calls of those few. Every other
use fills the same module.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "torch._dynamo"
_CONFIG = f"{NAME}.config"


class _Compiler(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the compiler's module, and executes it when it is used."""

    def __init__(self) -> None:
        self.module = ModuleType(NAME)
        self.empty: dict[str, Any] = {}
        """The module's attributes before it is executed."""
        self.is_empty = False
        self.kept: list[Callable[..., Any]] = []
        """The functions of torch that hold themselves, as `_keep` returned them."""
        self._is_executed = False
        self._lock = threading.RLock()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == NAME:
            if target is not None:  # to be reloaded
                self.load()
            elif not self._is_executed:
                real = PathFinder.find_spec(name, path)
                return real and ModuleSpec(name, self, origin=real.origin, loader_state=real, is_package=True)
        elif name.startswith(f"{NAME}.") and self.is_empty and name != _CONFIG:  # which needs no other module
            self.load()
            if name in sys.modules:  # to import it again would make a second module
                imported = sys.modules[name].__spec__
                return imported and ModuleSpec(name, self, origin=imported.origin, loader_state=imported)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name != NAME:
            return sys.modules[spec.name]
        if not self.empty:
            self.module = importlib.util.module_from_spec(spec.loader_state)
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        real = module.__spec__.loader_state
        if module.__name__ == NAME and self.empty:
            attributes = vars(module)
            given = {name: value for name, value in attributes.items() if name not in self.empty}  # by users
            real.loader.exec_module(module)
            attributes.update(given)
            del attributes["__getattr__"], attributes["__dir__"]
            self.is_empty, self._is_executed = False, True
        elif module.__name__ == NAME:
            vars(module).update(__getattr__=self._get, __dir__=self._names, __spec__=real, __loader__=real.loader)
            sys.modules["torch"].serialization.add_safe_globals([(_DimRange, f"{NAME}.decorators._DimRange")])
            self.empty, self.is_empty = dict(vars(module)), True
        module.__spec__ = real
        module.__loader__ = real.loader

    def load(self) -> Any:
        """Execute the module, unless it is, and return it."""
        with self._lock:
            is_first, self.is_empty, before = self.is_empty, False, dict(vars(self.module))
            if is_first:
                del sys.modules[NAME]
                for function in self.kept:  # torch asks again for those
                    for name in [name for name, value in vars(function).items() if value is function]:
                        delattr(function, name)
                self.kept.clear()
        try:
            return importlib.import_module(NAME)
        except BaseException:
            if is_first:  # so that the next use fails in the same way
                vars(self.module).clear()
                vars(self.module).update(before)
                sys.modules[NAME], self.is_empty = self.module, True
            raise

    def _get(self, name: str) -> Any:
        if self.is_empty:
            caller = sys._getframe(1).f_globals.get("__name__")
            if (caller, name) in _ANSWERS:
                return _ANSWERS[caller, name]
            if name == "config":
                return importlib.import_module(_CONFIG)
        if not self.is_empty or self._will_have(name):
            self.load()
            if name in vars(self.module):
                return vars(self.module)[name]
        raise AttributeError(f"module {NAME!r} has no attribute {name!r}", name=name, obj=self.module)

    def _will_have(self, name: str) -> bool:
        # Without executing it, since some look through all modules for a name.
        if name.startswith("__"):
            return name == "__all__"
        spec = self.module.__spec__
        code = spec.loader.get_code(NAME)  # type: ignore[union-attr]
        return name in code.co_names or PathFinder.find_spec(f"{NAME}.{name}", self.module.__path__) is not None

    def _names(self) -> list[str]:
        return list(vars(self.load()))


class _LikeReal(type):
    def __eq__(cls, other: object) -> bool:  # `torch.load` looks for either among the classes that it allows
        return (getattr(other, "__module__", ""), getattr(other, "__name__", "")) == (f"{NAME}.decorators", "_DimRange")

    __hash__ = type.__hash__


class _DimRange(metaclass=_LikeReal):
    """The compiler's class in files of nested tensors: `torch.load` allows it once the compiler is imported."""

    def __new__(cls, *args: Any) -> Any:
        real = _COMPILER.load().decorators._DimRange
        return real.__new__(real, *args)


def defer() -> None:
    """Put the import of the compiler off, unless it is imported, or is part of a bundle, whose finder comes first."""
    if NAME not in sys.modules and _COMPILER not in sys.meta_path and not getattr(sys, "frozen", False):
        sys.meta_path.insert(0, _COMPILER)


def _keep(fn: Any, recursive: bool = True, **options: Any) -> Any:
    with _COMPILER._lock:
        if _COMPILER.is_empty:
            _COMPILER.kept.append(fn)
            return fn
    return _COMPILER.load().disable(fn, recursive, **options)


def _disable_once(fn: Any, recursive: bool = True, **options: Any) -> Any:
    return fn if _COMPILER.is_empty else _COMPILER.load().disable(fn, recursive, **options)


def _get_optimize_ddp_mode() -> str:
    is_default = importlib.import_module(_CONFIG).optimize_ddp is True
    return "ddp_optimizer" if is_default else str(_COMPILER.load().utils.get_optimize_ddp_mode())


def _nothing() -> None:
    """What breaking a graph and clearing a cache are without the compiler."""


_COMPILER = _Compiler()
_ANSWERS: dict[tuple[str | None, str], Any] = {
    ("torch.optim.optimizer", "graph_break"): _nothing,
    ("torch._compile", "disable"): _keep,
    ("torch.utils.checkpoint", "disable"): _disable_once,
    ("torch.distributed.fsdp._fully_shard._fsdp_common", "disable"): _disable_once,
    ("torch.nn.parallel.distributed", "utils"): SimpleNamespace(get_optimize_ddp_mode=_get_optimize_ddp_mode),
    ("torch.distributed.distributed_c10d", "trace_rules"): SimpleNamespace(clear_lru_cache=_nothing),
}
"""What modules of torch get of the compiler before it is executed."""
