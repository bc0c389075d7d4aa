"""Known arguments: calls of the raw loop that name the nearest argument where a script has misspelt one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from trainwright.arguments import refuse_unknown

P = ParamSpec("P")
R = TypeVar("R")


def refuses_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, which raises TypeError with the nearest name for an unknown argument; a decorator."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    owner = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_unknown(owner, {name: value for name, value in kwargs.items() if name not in known}, known)
        return function(*args, **kwargs)

    return checked


def refuse_by_position(owner: str, given: Sequence[Any], example: str) -> None:
    """Raise TypeError for arguments that were not given by their name."""
    if given:
        raise TypeError(
            f"{owner} was given {', '.join(repr(each) for each in given)} by position; it takes its arguments by name, such as "
            f"{owner}({example})."
        )
