"""Rungs: their names on this machine, and the settings of each one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainwright.devices import abilities, hardware
from trainwright.precision import NAMES
from trainwright.strategies import SPAWNING, STRATEGIES, VARIANTS, resolve_strategy
from trainwright.strategies.memory_plan import ALONE, MEMORY_PLANS
from trainwright.tools.ladder.attempt import Attempt
from trainwright.tools.ladder.comparison import Comparison

UNCHANGED, COMPILE = "unchanged", "compile"
LEFT_OUT = {"deepspeed_stage_1"}
"""Strategies that need --rungs. Stage 2 takes less memory than stage 1 and is as fast."""


def known_rungs() -> list[str]:
    """Return the names that --rungs accepts: the rungs of a ladder, then other strategies."""
    others = [name for name in (*STRATEGIES, *VARIANTS) if name not in SPAWNING and name != ALONE]
    return list(dict.fromkeys([UNCHANGED, *NAMES, COMPILE, *MEMORY_PLANS, *others]))


def usual_rungs(device_type: str, num_devices: int) -> list[str]:
    """Return the rungs of a ladder on this machine."""
    half = "16-mixed" if device_type != "cpu" and abilities.autocasts(device_type, torch.float16) else "bf16-mixed"
    strategies = [name for name in MEMORY_PLANS if name not in LEFT_OUT] if num_devices > 1 else []
    return [UNCHANGED, half, COMPILE, *strategies]


def choose_devices(text: str, device_type: str) -> int:
    """Return the number of devices for the strategies.

    Raises:
        ValueError: the text is not a possible number, -1 for all, or "auto".
    """
    present = hardware.count(device_type) if device_type != "cpu" else None
    if text == "auto":
        return 2 if present is None else max(1, abilities.num_together(device_type))
    if text == "-1":
        return torch.get_num_threads() if present is None else present
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"--devices {text}: expected an integer of at least 1, -1 for all, or auto.")
    if present is not None and int(text) > present:
        raise ValueError(f"--devices {text}: torch sees {present} of {device_type!r} here; pass fewer, or add --cpu.")
    return int(text)


def settings_of(name: str, results: Mapping[str, Attempt], num_devices: int) -> dict[str, Any]:
    """Return the settings of a rung. It keeps the settings that made earlier rungs faster, where it can."""
    if name == UNCHANGED:
        return {}
    comparison = Comparison(list(results.values()), None)
    compiled = results.get(COMPILE)
    helps = compiled and comparison.is_faster(compiled, results[compiled.rung.precision or UNCHANGED])
    if name in NAMES:
        return {"precision": name, "compile": True if helps else None}
    precisions = ((name, result, COMPILE if result.rung.compile else UNCHANGED) for name, result in results.items())
    fast = [name for name, result, base in precisions if name in NAMES and comparison.is_faster(result, results[base])]
    precision = max(fast, key=lambda name: comparison.gain(results[name], results[UNCHANGED]), default=None)
    if name == COMPILE:
        return {"precision": precision, "compile": True}
    # False under a strategy that cannot compile, since the script may compile.
    compiles = None if resolve_strategy(name, num_devices).capabilities.takes_compile else False
    compiles = True if helps and compiles is None else compiles
    return {"precision": precision, "compile": compiles, "devices": num_devices, "strategy": name}
