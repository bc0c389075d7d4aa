"""Settings of the rung of a ladder, which replace those that a script gives to its Trainer or its Accelerator."""

from __future__ import annotations

from typing import Any

from trainwright.precision import Precision, canonical_name
from trainwright.rung import active_rung
from trainwright.strategies import Strategy, named_strategy

COMPILER = "inductor"
"""What compiles the prepared models of a script that names no backend itself."""


def under_rung(
    devices: Any, num_nodes: Any, accelerator: Any, strategy: Any, precision: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """Return the Engine's settings, with the rung's instead of the script's where it sets one.

    A strategy or a precision of the script stays if it is the rung's with options.
    """
    active = active_rung()
    if active is None:
        return devices, num_nodes, accelerator, strategy, precision
    rung = active.rung
    if rung.devices is not None:
        devices = active.replace("devices", devices, rung.devices)
        num_nodes = active.replace("num_nodes", num_nodes, 1)
    if rung.accelerator is not None:
        accelerator = active.replace("accelerator", accelerator, rung.accelerator)
    if rung.strategy is not None and not _is_variant(strategy, rung.strategy):
        strategy = active.replace("strategy", strategy, rung.strategy)
    if rung.precision is not None and not _is_called(precision, rung.precision):
        precision = active.replace("precision", precision, rung.precision)
    return devices, num_nodes, accelerator, strategy, precision


def rung_compiler(given: str | None) -> str | None:
    """Return the backend that compiles the prepared models of a raw loop; None if they run eagerly."""
    active = active_rung()
    if active is None or active.rung.compile is None:
        return given
    return active.replace("dynamo_backend", given, (given or COMPILER) if active.rung.compile else None)  # type: ignore[no-any-return]


def _is_variant(given: Any, name: str) -> bool:
    """Return whether a strategy that a script gives is the named one, perhaps with more options."""
    if isinstance(given, Strategy):
        return given.name == name
    if not isinstance(given, str) or given == "auto":
        return False
    (own, own_options), (base, options) = named_strategy(given, 2), named_strategy(name, 2)
    return own == base and options.items() <= own_options.items()


def _is_called(given: Any, name: str) -> bool:
    if isinstance(given, Precision):
        return given.name == name
    return isinstance(given, (str, int)) and canonical_name(str(given)) == name
