"""Rungs: which ones a ladder has on this machine, and what each of them sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainwright.devices import abilities, hardware
from trainwright.precision import NAMES
from trainwright.strategies import SPAWNING, STRATEGIES, VARIANTS, resolve_strategy
from trainwright.strategies.memory_plan import ALONE, MEMORY_PLANS
from trainwright.tools.ladder.attempt import Result
from trainwright.tools.ladder.comparison import Comparison

UNCHANGED, COMPILE = "unchanged", "compile"
LEFT_OUT = {"deepspeed_stage_1"}
"""A strategy that a ladder tries only if it is named: its stage 2 takes less memory, and is as fast."""


def known_rungs() -> list[str]:
    """Return the names that --rungs takes: those of a ladder, then further strategies."""
    others = [name for name in (*STRATEGIES, *VARIANTS) if name not in SPAWNING and name != ALONE]
    return list(dict.fromkeys([UNCHANGED, *NAMES, COMPILE, *MEMORY_PLANS, *others]))


def usual_rungs(device_type: str, num_devices: int) -> list[str]:
    """Return the rungs of a ladder on this machine."""
    half = "16-mixed" if device_type != "cpu" and abilities.autocasts(device_type, torch.float16) else "bf16-mixed"
    strategies = [name for name in MEMORY_PLANS if name not in LEFT_OUT] if num_devices > 1 else []
    return [UNCHANGED, half, COMPILE, *strategies]


def choose_devices(given: str, device_type: str) -> int:
    """Return on how many devices the strategies run: a number, -1 for all, or "auto" (ValueError)."""
    present = hardware.count(device_type) if device_type != "cpu" else None
    if given == "auto":
        return 2 if present is None else max(1, abilities.num_together(device_type))
    if given == "-1":
        return torch.get_num_threads() if present is None else present
    if not given.isascii() or not given.isdigit() or int(given) < 1:
        raise ValueError(f"--devices {given}: expected an integer of at least 1, -1 for all, or auto.")
    if present is not None and int(given) > present:
        raise ValueError(
            f"--devices {given}: torch sees {present} of {device_type!r} here; pass at most that many, or add --cpu."
        )
    return int(given)


def settings_of(name: str, results: Mapping[str, Result], num_devices: int) -> dict[str, Any]:
    """Return what a rung sets; each one keeps what has made the earlier ones faster, where it can."""
    if name == UNCHANGED:
        return {}
    comparison = Comparison(list(results.values()), None)
    helps = COMPILE in results and comparison.is_faster(
        results[COMPILE], results[results[COMPILE].rung.precision or UNCHANGED]
    )
    if name in NAMES:
        return {"precision": name, "compile": True if helps else None}
    fast = [
        each
        for each, own in results.items()
        if each in NAMES and comparison.is_faster(own, results[COMPILE if own.rung.compile else UNCHANGED])
    ]
    precision = max(fast, key=lambda each: comparison.gain(results[each], results[UNCHANGED]), default=None)
    if name == COMPILE:
        return {"precision": precision, "compile": True}
    # False where it cannot hold, in case the script compiles.
    compiles = None if resolve_strategy(name, num_devices).capabilities.takes_compile else False
    return {
        "precision": precision,
        "compile": True if helps and compiles is None else compiles,
        "devices": num_devices,
        "strategy": name,
    }
