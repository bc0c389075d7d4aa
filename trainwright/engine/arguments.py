"""Arguments that a class or a function does not have, refused in one way."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def refuse_unknown(
    owner: str, arguments: Mapping[str, Any], known: Iterable[str], replaced: Mapping[str, str] | None = None
) -> None:
    """Raise TypeError for arguments that the owner does not have; `replaced` says of some what to do instead."""
    for name, value in arguments.items():
        if name in (replaced or {}):
            raise TypeError(f"{owner} has no {name}= (it was given {name}={value!r}): {(replaced or {})[name]}.")
        close = difflib.get_close_matches(name, list(known), n=1)
        hint = f" Did you mean {close[0]}=?" if close else f" Its arguments are {', '.join(known)}."
        raise TypeError(f"{owner} has no argument {name}= (it was given {name}={value!r}).{hint}")
