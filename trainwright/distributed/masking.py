"""Masking: what of a job's variables and command lines may be shown to others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_SECRETS = frozenset(
    "secret secrets password passwords passwd passphrase credential credentials auth oauth authorization cookie cookies "
    "apikey apikeys accesskey secretkey privatekey authtoken accesstoken".split()
)
"""A name with one of these words is secret."""
_LAST = frozenset({"token", "key", "pass"})
"""A name that ends in one of these words is secret, as HF_TOKEN and wandbKey are, but not token_dim."""
_ORDINARY = frozenset(
    "max min num per pad eos bos unk cls sep mask start end stop special image text label input target output sort".split()
)
"""Unless the word before it is one of these: pad_token and label_key are names within data."""
_KEYS = re.compile(r"(?:api|access|private) (?:keys?|tokens?)(?: |$)")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
HIDDEN = "(not shown)"
SHORTEST = 8
"""Characters from which on a hidden value is looked for in other texts too; shorter ones are words such as "true"."""
_LOGIN = re.compile(r"(://)[^/\s]*:[^/\s]*@")
"""A name and a password in an address."""
_PAIR = re.compile(
    r"""([\w.-]*(?:secret|pass|credential|auth|cookie|key|token)[\w.-]*)(["']?\s*[:=]\s*["']?)([^\s"',&}\]]+)""", re.IGNORECASE
)
"""A name that may be secret and its value within an argument, as in a dict or in a query of an address."""


def is_secret(name: str) -> bool:
    """Return whether a value's name says that the value is secret, by the name's whole words.

    Words end at characters such as "_", "-" and ".", and where capitals begin. `hf_token`, `apiKey` and `DB_PASSWORD` are
    secret; `tokenizer`, `max_tokens`, `key_dim`, `num_keys` and `pad_token` are not.
    """
    words = [each.lower() for each in _WORD.findall(name)]
    if not _SECRETS.isdisjoint(words) or _KEYS.search(" ".join(words)):
        return True
    return bool(words) and words[-1] in _LAST and (len(words) == 1 or words[-2] not in _ORDINARY)


def shown(name: str, value: str) -> str:
    """Return a variable's value, unless its name or a password in an address says that it is secret."""
    return HIDDEN if is_secret(name) or _LOGIN.search(value) else value


def without_secrets(value: Any, name: str = "") -> Any:
    """Return plain data, such as hyper-parameters, with secret values replaced at any depth."""
    if value is None or isinstance(value, bool):
        return value
    if is_secret(name):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(item) for item in value]
    return _without_logins(value) if isinstance(value, str) else value


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
        follows_secret = each.startswith("-") and "=" not in each and " " not in each and is_secret(each)
        name, equals, value = each.partition("=")
        if is_value:
            parts.append(HIDDEN)
            hidden.add(each)
        elif equals and re.fullmatch(r"[\w.+~/@-]+", name) and is_secret(name):
            parts.append(f"{shlex.quote(name)}={HIDDEN}")
            hidden.add(value)
        else:
            pairs = [found for found in _PAIR.finditer(each) if is_secret(found[1])]
            hidden |= {found[3] for found in pairs}
            for found in reversed(pairs):
                each = f"{each[: found.start(3)]}{HIDDEN}{each[found.end(3) :]}"
            parts.append(shlex.quote(_without_logins(each)))
    long = {each for each in hidden if len(each) >= SHORTEST}
    return Masked(" ".join(parts), tuple(sorted(long, key=len, reverse=True)))


def _without_logins(text: str) -> str:
    return _LOGIN.sub(rf"\1{HIDDEN}@", text)
