"""Choices: lists of names that an option of a command takes, separated by commas."""

from __future__ import annotations

from collections.abc import Iterable

from trainwright.launch.config import nearest


def choose(given: str | None, known: Iterable[str], usual: Iterable[str], flag: str) -> list[str]:
    """Return the names that were given, or the usual ones (ValueError if one is unknown)."""
    if given is None:
        return list(usual)
    names = dict.fromkeys(known)
    chosen = [each.strip() for each in given.split(",")]
    for each in chosen:
        if each not in names:
            raise ValueError(f"{flag} {each}: choose from {', '.join(names)}.{nearest(each, names)}")
    return list(dict.fromkeys(chosen))
