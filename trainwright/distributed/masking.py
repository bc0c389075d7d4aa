"""Masking: variables and command lines without their secrets, to show to others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["HIDDEN", "shown"]

_SECRET = re.compile(
    r"\b(?:secrets?|passwords?|passwd|pwd|passphrase|bearer|credentials?|o?auth|authorization|cookies?)\b"
    r"|\b(?:api|access|private|auth) ?keys?\b"
    r"|\b(?:token|key|pass)$"
)  # words that mark a name as secret: the last three only at its end, because token_dim and key_dim are not secret
_ORDINARY = re.compile(
    r"\b(?:max|min|num|pad|eos|bos|unk|cls|sep|mask|start|end|stop|image|text|label|input|target|output|sort|batch|loss|cache"
    r"|primary|foreign|group|query|metric|data|forward|backward) (?:token|key|pass)$"
)  # names of parts of data, such as pad_token and label_key, which are not secret
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
HIDDEN = "(not shown)"
SHORTEST = 8  # characters of a hidden value that is also searched for in other texts: not of words such as "true"
_LOGIN = re.compile(r"(://)[^/\s]*:[^/\s]*@")  # a name and a password in an address
_TOKEN = re.compile(
    r"\b(?:(?:hf|gh[pousr])_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{20,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{35}|sk-[\w-]{0,20}?(?=[A-Za-z]{0,40}\d)[A-Za-z0-9]{20,}[\w-]*)"
)  # tokens of services, whatever their names are
_PAIR = re.compile(
    r"""([\w.-]*(?:secret|pass|credential|auth|cookie|key|token)[\w.-]*)(["']?\s*[:=]\s*["']?)([^\s"',&}\]]+)""",
    re.IGNORECASE,
)  # a possibly secret name and its value within an argument, as in a dict or in the query of an address


def is_secret(name: str) -> bool:
    """Return whether a value is secret according to the whole words of its name.

    Words end at characters such as "_", "-" and ".", and before capitals. `hf_token`, `apiKey` and `DB_PASSWORD` are secret,
    but not `tokenizer`, `max_tokens`, `key_dim`, `num_keys` and `pad_token`.
    """
    words = " ".join(_WORD.findall(name)).lower()
    return bool(_SECRET.search(words)) and not _ORDINARY.search(words)


def shown(name: str, value: Any) -> Any:
    """Return a named value of plain data without values of secret names, and passwords and tokens in texts."""
    is_number = isinstance(value, (int, float)) and name.lower().endswith(("token", "key"))
    if value is None or isinstance(value, bool) or is_number:
        return value
    if is_secret(name):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: shown(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [shown("", item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return _without_secrets(value) if isinstance(value, str) else value


class Masked(NamedTuple):
    """A command line without its secrets."""

    text: str
    hidden: tuple[str, ...] = ()
    """The values that were removed."""

    def applied_to(self, text: str) -> str:
        """Return another text, such as an error message, without these values and passwords in addresses."""
        for value in self.hidden:
            text = text.replace(value, HIDDEN)
        return _without_secrets(text)


def masked(arguments: Sequence[str]) -> Masked:
    """Return a command line without the values of arguments with secret names.

    An argument is "--name value", "--name=value" or "name=value", as in Hydra. A value does not begin with "-". Pairs within an
    argument, as in "model={api_key: value}", count too.
    """
    parts: list[str] = []
    hidden: set[str] = set()
    follows_secret = False
    for argument in arguments:
        is_value = follows_secret and not argument.startswith("-")
        is_name = argument.startswith("-") and "=" not in argument and " " not in argument
        follows_secret = is_name and is_secret(argument)
        name, equals, value = argument.partition("=")
        if is_value:
            parts.append(HIDDEN)
            hidden.add(argument)
        elif equals and re.fullmatch(r"[\w.+~/@-]+", name) and is_secret(name):
            parts.append(f"{shlex.quote(name)}={HIDDEN}")
            hidden.add(value)
        else:
            pairs = [found for found in _PAIR.finditer(argument) if is_secret(found[1])]
            hidden |= {found[3] for found in pairs}
            for found in reversed(pairs):
                argument = f"{argument[: found.start(3)]}{HIDDEN}{argument[found.end(3) :]}"
            parts.append(shlex.quote(_without_secrets(argument)))
    long = {value for value in hidden if len(value) >= SHORTEST}
    return Masked(" ".join(parts), tuple(sorted(long, key=len, reverse=True)))


def _without_secrets(text: str) -> str:
    return _TOKEN.sub(HIDDEN, _LOGIN.sub(rf"\1{HIDDEN}@", text))
