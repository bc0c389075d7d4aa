"""Anchored forward: a step of the module whose loss reaches a parameter on every rank, for ddp's search of unused ones."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.strategies.base import StepForward


class AnchoredForward(StepForward):
    """A step whose loss reaches at least one parameter of the wrapper, its anchor.

    A reducer marks the parameters that a loss does not use when a backward reaches one that it does use. A rank whose loss
    used none would take no part: the other ranks would wait for it, or be averaged with its next step.
    """

    def __init__(self, module: nn.Module, like: nn.Parameter) -> None:
        """Give the anchor the dtype and the device of a parameter that is trained."""
        super().__init__(module)
        dtype = like.dtype if like.is_floating_point() else torch.float32
        self.anchor = nn.Parameter(torch.zeros((), dtype=dtype, device=like.device))

    def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(name, *args, **kwargs)
        if name == "forward":  # of a loop that computes its own loss
            return result
        if isinstance(result, Tensor):
            return self.reach(result)
        if isinstance(result, dict) and isinstance(result.get("loss"), Tensor):
            result = copy(result)
            result["loss"] = self.reach(result["loss"])
        return result

    def reach(self, loss: Tensor) -> Tensor:
        """Return an equal loss whose backward reaches the anchor too, with a gradient of zero."""
        return loss + (self.anchor * 0.0).to(loss) if loss.requires_grad else loss
