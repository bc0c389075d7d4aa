"""Compilation: the submodules that a step calls, compiled without a wrapper, so that state_dict keeps its names."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from trainwright.devices.cuda import GraphGradients, makes_graphs
from trainwright.tensor_names import is_compiled
from trainwright.value_kinds import is_metric


class Compiled:
    """Compiles the submodules that a module's steps call, until `undo`.

    The module stays eager, because its steps log, and a log call would break the graph. Any submodule that a step calls, such
    as `self.net` or `self.net.encoder`, is compiled whole at its first call, with the submodules that it calls. torchmetrics
    objects, scripted modules and modules that the user has compiled are not compiled.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self._options = options
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        torch.compile(_call, **options)  # raises for wrong options
        self.is_within = False
        """True while a compiled submodule runs. The submodules that it calls are part of its graph."""
        self.modules = [layer for layer in _submodules(module) if type(layer).forward is not nn.Module.forward]
        """The submodules that would run compiled if a step called them."""
        self.gradients = GraphGradients(module) if makes_graphs(options) else None
        """Keeps gradients from one call to the next, or None if there are no graphs of the device."""
        for layer in self.modules:
            layer._compiled_call_impl = _Call(self, layer)

    def function_for(self, module: nn.Module) -> Callable[..., Any]:
        """Return the compiled function that calls a module, shared by modules of the same class and shapes."""
        tensors = (*module.named_parameters(), *module.named_buffers())
        kind = (type(module), *((name, value.shape, value.dtype, value.requires_grad) for name, value in tensors))
        if kind not in self._functions:
            # The compiler makes at most 8 graphs of a code object and then runs eagerly, so every kind gets a copy of the code.
            code = types.FunctionType(_call.__code__.replace(), _call.__globals__, _call.__name__)
            self._functions[kind] = torch.compile(code, **self._options)
        return self._functions[kind]

    def undo(self) -> None:
        """Make the submodules run eagerly again."""
        for layer in self.modules:
            if isinstance(layer._compiled_call_impl, _Call):  # the user may have compiled it by hand since
                del layer._compiled_call_impl
        self.modules = []
        self._functions.clear()


class _Call:
    """Replaces a submodule's call, which runs its forward and hooks."""

    def __init__(self, compiled: Compiled, module: nn.Module) -> None:
        self.compiled, self.module = compiled, module
        self.function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The compiler may get here while it traces a module with hooks, and the interpreter after a break in a graph.
        if torch.compiler.is_compiling() or self.compiled.is_within:
            return self.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.function is None:
            self.function = self.compiled.function_for(self.module)
        if self.compiled.gradients is not None:
            self.compiled.gradients.keep()
        self.compiled.is_within = True
        try:
            return self.function(self.module, *args, **kwargs)
        finally:
            self.compiled.is_within = False


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _submodules(module: nn.Module) -> list[nn.Module]:
    """Return all submodules that may be compiled."""
    submodules = [layer for layer in module.modules() if layer is not module]
    excluded = {
        inner
        for layer in submodules
        if is_metric(layer)
        or isinstance(layer, torch.jit.ScriptModule)
        or layer._compiled_call_impl is not None
        or is_compiled(layer)
        for inner in layer.modules()
    }
    return [layer for layer in submodules if layer not in excluded]
