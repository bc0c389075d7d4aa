"""Arguments that a class or a function does not accept: one form of error for all of them."""

from __future__ import annotations

import difflib
import functools
import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

__all__ = ["instead_of"]


def refuse_unknown(
    owner: str, arguments: Mapping[str, Any], known: Iterable[str], replaced: Mapping[str, str] | None = None
) -> None:
    """Raise TypeError for arguments that the owner does not have.

    `replaced` maps the names of other packages' arguments to what to do instead.
    """
    known = list(known)
    for name, value in arguments.items():
        if replaced is not None and name in replaced:
            raise TypeError(f"{owner} has no {name}= (it was given {name}={value!r}): {replaced[name]}.")
        close = [word for word in known if word.endswith(f"_{name}")] or difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {'= or '.join(close)}=?" if close else f"Its arguments are {', '.join(known) or 'none'}."
        raise TypeError(f"{owner} has no argument {name}= (it was given {name}={value!r}). {hint}")


def refuses_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that raises TypeError with the nearest name for an unknown argument. A decorator."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    owner = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_unknown(owner, {name: value for name, value in kwargs.items() if name not in known}, known)
        return function(*args, **kwargs)

    return checked


def check_flags(**given: Any) -> None:
    """Raise TypeError for an argument that is neither True nor False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is not accepted. Pass True or False.")


def foreign_hint(value: Any) -> str:
    """Return the advice for an object of one of Lightning's classes, or "" for any other object."""
    packages = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    if packages.isdisjoint(("lightning", "pytorch_lightning", "lightning_fabric")):
        return ""
    return " This one is of Lightning's own classes. Import its base from trainwright too (docs/migrating.md)."


class NamedArguments:
    """Base of dataclasses that reject unknown arguments with the nearest name."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        known = inspect.signature(cls).parameters
        refuse_unknown(cls.__name__, {name: value for name, value in given.items() if name not in known}, known)
        return super().__new__(cls)


@functools.cache
def replaced_names() -> dict[str, str]:
    """Return the advice on every name of Lightning and Accelerate that does not exist here."""
    groups = tomllib.loads(Path(__file__).with_name("replaced_names.toml").read_text(encoding="utf-8"))
    return {name: advice for names, advice in groups.items() for name in names.split()}


def instead_of(name: str, path: str = "") -> str:
    """Return ": " and the advice on a missing name, or "" if there is none.

    `path` is the name's module in Lightning, such as "accelerators".
    """
    names = replaced_names()
    advice = names.get(f"{path.partition('.')[0]}.{name}", names.get(name))
    return "" if advice is None else f": {advice}"
