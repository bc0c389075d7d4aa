"""The autograd graph of a loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction


def graph_leaves(loss: Tensor) -> set[Tensor]:
    """Return the tensors to which the loss's backward adds gradients; empty if a part of the graph cannot be seen."""
    found: set[Tensor] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            return set()  # such as a checkpoint's, which builds its part in backward
        if hasattr(node, "variable"):
            found.add(node.variable)
        waiting.extend(each for each, _ in node.next_functions)
    return found
