"""Used parameters: those that received a gradient since the last step, where engines fill the others with zeros."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class UsedParameters:
    """Tracks which parameters receive gradients; a step leaves unused ones alone, as on one process."""

    def __init__(self) -> None:
        self._found: set[Tensor] = set()
        self._hooks: list[Any] = []

    def track(self, parameters: Iterable[Any]) -> None:
        """Track these parameters from now on."""
        for parameter in parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._found.add))

    def is_unused(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Return whether no rank used a parameter; on other ranks a nonzero averaged gradient shows it."""
        return parameter not in self._found and not bool(gradient.any())

    def clear(self) -> None:
        """Start over, after a step or when gradients were discarded."""
        self._found.clear()

    def close(self) -> None:
        """Stop tracking."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._found.clear()
