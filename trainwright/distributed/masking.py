"""Masking: what of a job's variables and command lines may be shown to others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

_WORDS = "TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE"
SECRET = re.compile(_WORDS, re.IGNORECASE)
"""What is in the name of a secret."""
HIDDEN = "(not shown)"
SHORTEST = 8
"""Characters from which on a hidden value is looked for in other texts too; shorter ones are words such as "true"."""
_LOGIN = re.compile(r"(://)[^/\s]*:[^/\s]*@")
"""A name and a password in an address."""
_PAIR = re.compile(rf"""([\w.-]*(?:{_WORDS})[\w.-]*["']?\s*[:=]\s*["']?)([^\s"',&}}\]]+)""", re.IGNORECASE)
"""A secret's name and its value within an argument, as in a dict or in a query of an address."""


def shown(name: str, value: str) -> str:
    """Return a variable's value, unless its name or a password in an address says that it is secret."""
    return HIDDEN if SECRET.search(name) or _LOGIN.search(value) else value


class Masked(NamedTuple):
    """A command line without its secrets."""

    text: str
    hidden: tuple[str, ...] = ()
    """The values that it leaves out."""

    def applied_to(self, text: str) -> str:
        """Return another text, such as an error's, without these values and without passwords in addresses."""
        for value in self.hidden:
            text = text.replace(value, HIDDEN)
        return _without_logins(text)


def masked(arguments: Sequence[str]) -> Masked:
    """Return a command line without the values of arguments whose names say that they are secret.

    An argument is "--name value", "--name=value" or "name=value", as Hydra takes it; a value is what does not begin with "-".
    Pairs within an argument, as in "model={api_key: value}", count too.
    """
    parts: list[str] = []
    hidden: set[str] = set()
    follows_secret = False
    for each in arguments:
        is_value = follows_secret and not each.startswith("-")
        follows_secret = each.startswith("-") and "=" not in each and " " not in each and bool(SECRET.search(each))
        name, equals, value = each.partition("=")
        if is_value:
            parts.append(HIDDEN)
            hidden.add(each)
        elif equals and re.fullmatch(r"[\w.+~/@-]+", name) and SECRET.search(name):
            parts.append(f"{shlex.quote(name)}={HIDDEN}")
            hidden.add(value)
        else:
            hidden |= {found[2] for found in _PAIR.finditer(each)}
            parts.append(shlex.quote(_without_logins(_PAIR.sub(rf"\1{HIDDEN}", each))))
    long = {each for each in hidden if len(each) >= SHORTEST}
    return Masked(" ".join(parts), tuple(sorted(long, key=len, reverse=True)))


def _without_logins(text: str) -> str:
    return _LOGIN.sub(rf"\1{HIDDEN}@", text)
