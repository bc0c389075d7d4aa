"""What the command line asked for, where a script leaves it open."""

from __future__ import annotations

from typing import Any

from trainwright.distributed.environment import Environment
from trainwright.precision import resolve_precision
from trainwright.rank_zero import rank_zero_warn


def fill_open(environment: Environment, accelerator: Any, strategy: Any, precision: Any) -> tuple[Any, Any, Any]:
    """Return the settings, with what `trainwright launch` was told in place of "auto" and None; else the script's win."""
    given = {"accelerator": accelerator, "strategy": strategy, "precision": precision}
    told = {
        "accelerator": environment.accelerator,
        "strategy": environment.strategy,
        "precision": environment.precision,
    }
    for name, asked in told.items():
        if asked is None:
            continue
        if given[name] in (None, "auto"):
            given[name] = asked
        elif _name_of(name, given[name]) != _name_of(name, asked):
            flag = "--cpu" if name == "accelerator" else f"--{name} {asked}"
            rank_zero_warn(
                f"the command line says {flag}, and the script {name}={given[name]!r}; the script's is used. Leave {name}= out "
                "of the script for the command line to choose.",
                stacklevel=4,
            )
    return given["accelerator"], given["strategy"], given["precision"]


def _name_of(setting: str, value: Any) -> Any:
    if setting == "precision":
        return resolve_precision(value, "cpu").name
    return getattr(value, "name", value)
