"""Machine: the strategies and precisions that can be used here."""

from __future__ import annotations

import torch

from trainwright.devices import abilities, hardware
from trainwright.strategies import resolve_strategy
from trainwright.strategies.memory_plan import ALONE, MEMORY_PLANS

LISTED_STRATEGIES = (ALONE, *MEMORY_PLANS)
"""The names that the commands list and try, in the order in which a strategy is recommended; `STRATEGIES` has the classes."""


def best_precision() -> str:
    """Return a mixed precision that the accelerator here computes in, or else "32-true"."""
    kind = hardware.accelerator_type()
    for name, dtype in (("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)):
        if kind is not None and abilities.autocasts(kind, dtype):
            return name
    return "32-true"


def why_missing(strategy: str) -> str:
    """Return why a strategy cannot be used here, with what to install, or "" if it can."""
    try:
        resolve_strategy(strategy, 2)
    except ImportError as error:
        return str(error)
    return ""
