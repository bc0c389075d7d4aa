"""Calls to loggers that may fail: a full disk or a service without an answer never ends a training."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from trainwright.faults.remote_calls import is_outage


@dataclass
class _Outage:
    """An outage of one logger. `rows` counts the rows that it has lost, also in earlier outages."""

    rows: int = 0
    call: str = ""
    """The method whose success ends the outage, or "" if the logger works."""


_outages: dict[int, _Outage] = {}
"""The outages by the logger's id, until the logger is closed."""


def outlived(logger: Any, name: str, *arguments: Any, **options: Any) -> Any:
    """Return the result of a logger's method. An outage is one warning, and the result None.

    Another warning follows when the logger works again, or is closed while rows are missing. Errors of a program are raised.
    """
    kind, result = type(logger).__name__, None
    outage = _outages.get(id(logger), _Outage())
    try:
        result = getattr(logger, name)(*arguments, **options)
    except Exception as error:
        if not is_outage(error):
            raise
        outage.rows += name == "log_metrics"
        if not outage.call:
            outage.call = name
            _outages[id(logger)] = outage
            warnings.warn(
                f"{kind}.{name} failed: {type(error).__name__}: {str(error).rstrip('.')}. Training continues, and rows of this "
                "logger may be lost.",
                stacklevel=2,
            )
    else:
        if outage.call == name:
            outage.call = ""
            warnings.warn(f"{kind} works again; {_lost(logger, outage)}.", stacklevel=2)
    if name == "close" and _outages.pop(id(logger), None) is not None and outage.call:
        warnings.warn(f"{kind} was closed before it worked again; {_lost(logger, outage)}.", stacklevel=2)
    return result


def _lost(logger: Any, outage: _Outage) -> str:
    return f"{outage.rows + getattr(logger, 'num_missing', 0)} rows lost"
