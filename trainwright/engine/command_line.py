"""Settings of the command line, for those that a script leaves open."""

from __future__ import annotations

from typing import Any

from trainwright.distributed.environment import Environment
from trainwright.precision import resolve_precision
from trainwright.rank_zero import rank_zero_warn


def fill_open(environment: Environment, accelerator: Any, strategy: Any, precision: Any) -> tuple[Any, Any, Any]:
    """Return the settings, those that are "auto" or None replaced by the arguments of `trainwright launch`."""
    chosen = []
    for name, setting, argument in (
        ("accelerator", accelerator, environment.accelerator),
        ("strategy", strategy, environment.strategy),
        ("precision", precision, environment.precision),
    ):
        is_open = setting in (None, "auto")
        if argument is not None and not is_open and _name_of(name, setting) != _name_of(name, argument):
            flag = "--cpu" if name == "accelerator" else f"--{name} {argument}"
            _warn(flag, name, setting)
        chosen.append(argument if is_open and argument is not None else setting)
    accelerator, strategy, precision = chosen
    return accelerator, strategy, precision


def fill_accumulation(environment: Environment, name: str, given: int) -> int:
    """Return the batches per optimizer step: the script's, or those of `trainwright launch` where the script says 1."""
    steps = environment.gradient_accumulation_steps
    if steps is None or given == steps:
        return given
    if given == 1:
        return steps
    _warn(f"--gradient-accumulation-steps {steps}", name, given)
    return given


def _warn(flag: str, name: str, setting: Any) -> None:
    rank_zero_warn(
        f"the command line or its config says {flag}, and the script {name}={setting!r}; the script's is used. Leave "
        f"{'precision= or mixed_precision' if name == 'precision' else name}= out of the script to leave it open.",
        stacklevel=5,
    )


def _name_of(setting: str, value: Any) -> Any:
    return resolve_precision(value, "cpu").name if setting == "precision" else getattr(value, "name", value)
