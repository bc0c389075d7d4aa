"""Compilation: a module's children compiled in place, so that its state_dict keeps its names."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainwright.module import is_metric


def compile_children(module: nn.Module, options: dict[str, Any]) -> int:
    """Compile, in place, the outermost submodules that have a forward of their own; return how many.

    The module itself stays eager: its steps log, and a log call would break the graph. Containers without a forward
    (ModuleList, ModuleDict) are looked through; torchmetrics objects are left alone.
    """
    count = 0
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            count += compile_children(child, options)
        elif not is_metric(child):
            child.compile(**options)
            count += 1
    return count
