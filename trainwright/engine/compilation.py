"""Compilation: the submodules that a step calls, compiled without a wrapper, so that state_dict keeps its names.

The repeated blocks of a net are compiled once, and called by the net's eager forward: twelve layers need one graph.
"""

from __future__ import annotations

import types
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from trainwright.devices.cuda import GraphGradients, makes_graphs
from trainwright.faults.vendor import CompilationWatch
from trainwright.memory.activation_checkpointing import repeated_blocks
from trainwright.rank_zero import rank_zero_warn
from trainwright.tensor_names import is_compiled
from trainwright.value_kinds import is_metric

FEWEST_BLOCKS = 3
"""From this number of equal blocks on, each is compiled separately."""
MOST_RECOMPILES = 2
"""A change of the batch size and one of the length are usual. Every later recompilation is a warning."""


class Compiled:
    """Compiles the submodules that a module's steps call, until `undo`.

    The module stays eager, because its steps log, and a log call would break the graph. Any submodule that a step calls, such
    as `self.net` or `self.net.encoder`, is compiled whole at its first call, with the submodules that it calls. If equal blocks
    have most of its parameters, it stays eager and they are compiled, unless the option `whole` is True. torchmetrics objects,
    scripted modules and modules that the user has compiled are not compiled.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self._options = {name: value for name, value in options.items() if name != "whole"}
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        torch.compile(_call, **self._options)  # raises for wrong options
        self._watch = CompilationWatch(__file__)
        self.recompiles: list[str] = []
        """The causes of compilations after the first, as torch describes them."""
        self._counts: Counter[Hashable] = Counter()
        self.is_within = False
        """True while a compiled submodule runs. The submodules that it calls are part of its graph."""
        # A graph of the device overwrites the outputs of its last run, and equal blocks would share one.
        eager = set() if options.get("whole") or makes_graphs(options) else _around_blocks(module)
        submodules = (layer for layer in _submodules(module) if layer not in eager)
        self.modules = [layer for layer in submodules if type(layer).forward is not nn.Module.forward]
        """The submodules that would run compiled if a step called them."""
        self.gradients = GraphGradients(module) if makes_graphs(options) else None
        """Keeps gradients from one call to the next, or None if there are no graphs of the device."""
        for layer in self.modules:
            layer._compiled_call_impl = _Call(self, layer)

    def function_for(self, module: nn.Module) -> Callable[..., Any]:
        """Return the compiled function that calls a module, shared by modules of the same class and shapes."""
        kind = _kind(module)
        if kind not in self._functions:
            # The compiler makes at most 8 graphs of a code object and then runs eagerly, so every kind gets a copy of the code.
            code = types.FunctionType(_call.__code__.replace(), _call.__globals__, _call.__name__)
            self._functions[kind] = torch.compile(code, **self._options)
        return self._functions[kind]

    def report(self, module: nn.Module, function: Callable[..., Any]) -> None:
        """Record new compilations of a module's function, and warn from its third, with gradients or without."""
        causes, key = self._watch.new_causes(), (function, torch.is_grad_enabled())
        self.recompiles += causes
        self._counts[key] += len(causes)
        if causes and self._counts[key] > MOST_RECOMPILES:
            rank_zero_warn(
                f"compile= has compiled {type(module).__name__} again {self._counts[key]} times, which takes seconds to "
                f"minutes. The latest cause: {causes[-1]}. Pad to fewer shapes, pass drop_last=True to the loader, or omit "
                "compile=.",
                stacklevel=3,
            )

    def undo(self) -> None:
        """Make the submodules run eagerly again."""
        self._watch.close()
        for layer in self.modules:
            if isinstance(layer._compiled_call_impl, _Call):  # the user may have compiled it by hand since
                del layer._compiled_call_impl
        self.modules = []
        self._functions.clear()

    @property
    def has_news(self) -> bool:
        """Return whether something was compiled since the latest report."""
        return self._watch.has_news


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
            if self.compiled.has_news:
                self.compiled.report(self.module, self.function)


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _kind(module: nn.Module) -> tuple[Hashable, ...]:
    """Return a value that is equal for modules of the same class with tensors of the same names and shapes."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return type(module), *((name, value.shape, value.dtype, value.requires_grad) for name, value in tensors)


def _around_blocks(module: nn.Module) -> set[nn.Module]:
    """Return the modules that stay eager because equal blocks in them are compiled, and the single layers beside the blocks."""
    alike: dict[Hashable, list[nn.Module]] = defaultdict(list)
    for block in repeated_blocks(module):
        alike[_kind(block)].append(block)
    blocks = [block for group in alike.values() if len(group) >= FEWEST_BLOCKS for block in group]
    eager = {layer for layer in module.modules() if layer not in blocks and _has_most_parameters(blocks, layer)}
    return eager | {child for layer in eager - {module} for child in layer.children() if not any(child.children())}


def _has_most_parameters(blocks: Sequence[nn.Module], layer: nn.Module) -> bool:
    inside = set(layer.modules())
    parameters = {parameter for block in blocks if block in inside for parameter in block.parameters()}
    return 2 * sum(p.numel() for p in parameters) > sum(p.numel() for p in layer.parameters())


def _submodules(module: nn.Module) -> list[nn.Module]:
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
