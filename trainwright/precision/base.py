"""The precision contract, with full 32-bit precision as its default.

A precision says in which context a forward runs, how a loss is sent backward and how an optimizer is stepped. It knows
nothing of processes: what ranks have to do together is the strategy's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

Clipper = Callable[[Optimizer], "Tensor | None"]


class StepResult(NamedTuple):
    """What one optimizer step did.

    `norm` is the total gradient norm before clipping (a 0-dim tensor; None where nothing was clipped by norm), `skipped`
    is True where the step was left out because the gradients held an inf or a NaN.
    """

    norm: Tensor | None
    skipped: bool


PLAIN_STEP = StepResult(None, False)


class Precision:
    """Full precision: nothing is converted and nothing is scaled."""

    name = "32-true"
    autocast_dtype: torch.dtype | None = None

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return the context that a forward runs in, entered anew for each; None where there is none."""
        return None

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Send the loss backward."""
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, clip: Clipper | None) -> StepResult:
        """Clip the gradients where asked, then step the optimizer."""
        if clip is None:
            optimizer.step()
            return PLAIN_STEP
        norm = clip(optimizer)
        optimizer.step()
        return StepResult(norm, False)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of this optimizer by the loss scale, once a step; nothing here."""

    def forget(self, optimizer: Optimizer) -> None:
        """Take note that this optimizer's gradients were dropped, perhaps without a step; nothing here."""

    def reset(self) -> None:
        """Begin anew, as a run does; nothing here."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on with the same scale."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
