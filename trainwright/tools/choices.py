"""Choices: the strategies and precisions of this machine, and options that take a list of names."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainwright.devices import abilities, hardware
from trainwright.errors import did_you_mean
from trainwright.strategies import resolve_strategy
from trainwright.strategies.memory_plan import ALONE, MEMORY_PLANS

LISTED_STRATEGIES = (ALONE, *MEMORY_PLANS)
"""The strategies that the commands list and try, in the order of recommendation."""


def best_precision() -> str:
    """Return a mixed precision that this accelerator supports, or "32-true"."""
    kind = hardware.accelerator_type()
    for name, dtype in (("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)):
        if kind is not None and abilities.autocasts(kind, dtype):
            return name
    return "32-true"


def why_missing(strategy: str) -> str:
    """Return why a strategy cannot be used here, with the pip line, or ""."""
    try:
        resolve_strategy(strategy, 2)
    except ImportError as error:
        return str(error)
    return ""


def choose(text: str | None, known: Iterable[str], usual: Iterable[str], flag: str) -> list[str]:
    """Return the names in an option's text, or the usual names if there is no text.

    Raises:
        ValueError: a name is unknown.
    """
    if text is None:
        return list(usual)
    names = dict.fromkeys(known)
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in names:
            raise ValueError(f"{flag} {name}: choose from {', '.join(names)}.{did_you_mean(name, names)}")
    return list(dict.fromkeys(chosen))
