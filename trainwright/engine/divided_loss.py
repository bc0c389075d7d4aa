"""A divided loss: what a window's losses are divided by, so that each batch weighs the same whatever their dtype."""

from __future__ import annotations

import torch
from torch import Tensor

LOW = (torch.float16, torch.bfloat16)


def divisor_of(length: int, dtype: torch.dtype) -> float:
    """Return what a window's losses are divided by: its length, or for a low precision the number next to it that is exact.

    The gradient that enters a loss has the loss's dtype. In bfloat16 a third is 0.2 % too large, in all gradients alike; so
    the losses are divided by the reciprocal of that, and the gradients multiplied, in their own dtype, with what is missing.
    """
    if dtype not in LOW:
        return length
    return 1.0 / torch.tensor(1.0 / length, dtype=dtype).item()


def in_float32(loss: Tensor) -> Tensor:
    """Return the loss in float32 where it has a lower precision."""
    return loss.float() if loss.dtype in LOW else loss
