"""LambdaCallback: a callback of plain functions."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from trainwright.callbacks.base import HOOKS, Callback
from trainwright.errors import a_type_of


class LambdaCallback(Callback):
    """Calls the given functions at their hooks.

    Args:
        hooks: functions by the name of their hook, such as on_fit_end, called with that hook's arguments; None is ignored.

    Raises:
        TypeError: a name is not that of a hook, or a value is neither a function nor None.

    >>> announce = tw.LambdaCallback(on_fit_end=lambda trainer, module: print(trainer.global_step, "steps"))
    >>> tw.Trainer(callbacks=announce, max_epochs=1, enable_model_summary=False).fit(module, loader)
    8 steps
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                near = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.0)
                raise TypeError(
                    f"LambdaCallback was given {name!r}, which is not a hook; expected one of {', '.join(HOOKS)}. "
                    f"Did you mean {near[0]!r}?"
                )
            if function is not None and not callable(function):
                raise TypeError(f"{name}={function!r} is {a_type_of(function)}; expected a function or None.")
            if function is not None:
                setattr(self, name, function)  # on the instance, so that other hooks cost nothing
