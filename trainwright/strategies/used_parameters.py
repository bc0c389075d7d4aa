"""Reached parameters: those that a loss has led a gradient to since the last step, where engines give zeros to the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class UsedParameters:
    """Notes which parameters a loss reaches; one that none has reached stays as it is in a step, as on one process."""

    def __init__(self) -> None:
        self._found: set[Tensor] = set()
        self._hooks: list[Any] = []

    def track(self, parameters: Iterable[Any]) -> None:
        """Take note of these parameters from here on."""
        for parameter in parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._found.add))

    def is_unused(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Return whether no loss has reached a parameter, here or, as its averaged gradient tells, on another rank."""
        return parameter not in self._found and not bool(gradient.any())

    def clear(self) -> None:
        """Take note that the gradients have been stepped with, or dropped."""
        self._found.clear()

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._found.clear()
