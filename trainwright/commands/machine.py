"""Machine: the devices, strategies and packages that are here."""

from __future__ import annotations

import torch

from trainwright.devices import abilities, accelerator
from trainwright.launch.processes import num_cores
from trainwright.strategies import resolve_strategy
from trainwright.strategies.memory_plan import ALONE, MEMORY_PLANS

LISTED_STRATEGIES = (ALONE, *MEMORY_PLANS)
"""The names that the commands list and try, in the order in which a strategy is recommended; `STRATEGIES` has the classes."""


def describe_devices() -> str:
    """Return a machine's devices in words."""
    kind, count = accelerator.accelerator_type(), accelerator.count()
    cores = f"{num_cores()} CPU cores"
    if kind is None or not count:
        return f"{cores} and no GPU"
    module = torch.get_device_module(kind)
    name = module.get_device_name(0) if hasattr(module, "get_device_name") else kind
    return f"{cores} and {count} GPU(s): {name}"


def best_precision() -> str:
    """Return a mixed precision that the accelerator here computes in, or else "32-true"."""
    kind = accelerator.accelerator_type()
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
