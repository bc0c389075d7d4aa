"""Observer: what a tool that runs a script can watch of its Trainers and its loops. overrides.py finds the tool's observer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["LoopObserver", "Observer"]


class LoopObserver:
    """Watches one loop that is written with an Accelerator. The methods of the base class do nothing."""

    def begin(self, device: torch.device, strategy: str, precision: str, num_processes: int) -> None:
        """Called before the loop's objects are prepared, at each call of prepare."""

    def note_pass(self) -> None:
        """Called when a pass over a prepared loader begins."""

    def note_batch(self, num_samples: int | None) -> None:
        """Called with the number of samples of each batch, or None if the batch does not show it."""

    def note_training(self) -> None:
        """Called after each backward."""

    def note_step(self, count: int) -> None:
        """Called after each step of a prepared optimizer, with the number of all steps. It may end the loop by SystemExit."""


class Observer:
    """Watches the Trainers and the loops of a process. The methods of the base class do nothing.

    A tool names its subclass in the file of overrides. It is made without arguments, when it is first needed.
    """

    def note_made(self, owner: str) -> None:
        """Called when a Trainer has been made, or its constructor has failed."""

    def added_arguments(self, owner: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a constructor to change, such as `callbacks`, from those of the script."""
        return {}

    def loop(self) -> LoopObserver:
        """Return the observer of the loop of a new Accelerator."""
        return LoopObserver()

    def note_logged(self, values: Mapping[str, Any]) -> None:
        """Called with the values that a loop logs."""
