"""Compilation: the submodules that a step calls, compiled in place, so that state_dict keeps its names."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from trainwright.compiled_names import is_compiled
from trainwright.metric_kinds import is_metric


class Compiled:
    """A module whose submodules run compiled, until `undo`.

    The module itself stays eager: its steps log, and a log call would break the graph. Whichever submodule a step calls, be
    it `self.net` or `self.net.encoder`, is compiled whole at its first call; what that one calls is part of its graph.

    Args:
        module: the root. torchmetrics objects, scripted modules and what the user has compiled are left alone.
        options: keyword arguments for torch.compile.

    Raises:
        ValueError: torch.compile refuses the options.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self.options = dict(options)
        # The compiler makes at most 8 graphs of one piece of code, and runs eagerly beyond it: all layers of a class would
        # share them. torch 2.11 has no option against that; there each function that is compiled gets code of its own.
        self._has_isolation = "isolate_recompiles" in inspect.signature(torch.compile).parameters
        if self._has_isolation:
            self.options.setdefault("isolate_recompiles", True)
        try:
            torch.compile(_call, **self.options)
        except (TypeError, RuntimeError) as error:
            raise ValueError(f"compile={options!r} is refused by torch.compile: {error}") from error
        self.called: set[nn.Module] = set()
        """The submodules that a step called, and that run compiled therefore."""
        self.is_within = False
        """True while a compiled submodule runs: what it calls is not compiled anew."""
        self.modules = [each for each in _submodules(module) if type(each).forward is not nn.Module.forward]
        """The submodules that would run compiled if a step called them."""
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        for each in self.modules:
            each._compiled_call_impl = _Call(self, each)

    def function_for(self, module: nn.Module) -> Callable[..., Any]:
        """Return the compiled function that calls a module, given as its first argument.

        Modules alike in class and shapes (the blocks of a ModuleList, say) share one, and so its graphs.
        """
        self.called.add(module)
        tensors = (*module.named_parameters(), *module.named_buffers())
        kind = (type(module), *((name, each.shape, each.dtype, each.requires_grad) for name, each in tensors))
        if kind not in self._functions:
            # The compiler enters no frame of torch's own layers, so those get one around them.
            is_torchs = type(module).forward.__module__.startswith("torch.")
            function = _call if is_torchs else type(module)._call_impl
            self._functions[kind] = torch.compile(function if self._has_isolation else _copy_of_call(), **self.options)
        return self._functions[kind]

    def undo(self) -> None:
        """Let the submodules run eagerly again."""
        for each in self.modules:
            if isinstance(each._compiled_call_impl, _Call):  # the user may have compiled it by hand since
                del each._compiled_call_impl
        self.modules, self.called = [], set()
        self._functions.clear()


def compile_module(module: nn.Module, options: dict[str, Any]) -> Compiled:
    """Compile, in place, the submodules that the steps of a module call."""
    return Compiled(module, options)


class _Call:
    """What a submodule's call runs instead of its forward and hooks."""

    def __init__(self, compiled: Compiled, module: nn.Module) -> None:
        self.compiled, self.module = compiled, module
        self.function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Within a graph the compiler itself may come here (a module with hooks), and after a break in one the interpreter.
        if torch.compiler.is_compiling() or self.compiled.is_within:
            return self.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.function is None:
            self.function = self.compiled.function_for(self.module)
        self.compiled.is_within = True
        try:
            return self.function(self.module, *args, **kwargs)
        finally:
            self.compiled.is_within = False


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _copy_of_call() -> Callable[..., Any]:
    """Return `_call` with a code object of its own, which the compiler counts graphs by."""
    return types.FunctionType(_call.__code__.replace(), _call.__globals__, _call.__name__)


def _submodules(module: nn.Module) -> list[nn.Module]:
    """Return what stands below a module, without what is to be left alone."""
    left_alone: set[nn.Module] = set()
    for each in module.modules():
        if (
            each is not module
            and each not in left_alone
            and (
                is_metric(each)
                or is_compiled(each)
                or isinstance(each, torch.jit.ScriptModule)
                or each._compiled_call_impl is not None
            )
        ):
            left_alone.update(each.modules())
    return [each for each in module.modules() if each is not module and each not in left_alone]
