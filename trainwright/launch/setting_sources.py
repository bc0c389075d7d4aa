"""The sources of `trainwright launch`'s settings: flags, the environment, the config, and defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainwright.launch.config import KEY_OF, KEYS, Config

__all__ = ["NameCheck", "Sources"]


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


FLAGS = {name: flag_of(name) for name in KEYS if name != "env"}
VARIABLE_OF = {key: variable for variable, key in KEY_OF.items()}

NameCheck = Callable[[str | None, str | None, int], str | None]
"""Refuses an unknown strategy or precision, given the number of processes, and returns the Trainer's name of the precision."""


class LaunchSetting(NamedTuple):
    """A value and its source: a flag, a variable of the environment, a line of the config, or "default"."""

    value: Any
    source: str


class Given(NamedTuple):
    """A value as it was given, its source, and how errors call both."""

    text: str
    source: str
    label: str


def read_number(given: Given | None, *, default: int | None, least: int = 0, more: str = "") -> LaunchSetting:
    """Return an integer, or the default if none was given (ValueError if the text is another)."""
    if given is None:
        return LaunchSetting(default, "default")
    # int() would also take " 5" and "1_000", and isdigit() superscripts, which int() rejects.
    if not (given.text.isascii() and given.text.isdigit()) or int(given.text) < least:
        raise ValueError(f"{given.label}: expected an integer of at least {least}{more}.")
    return LaunchSetting(int(given.text), given.source)


@dataclass(frozen=True)
class Sources:
    """The flags, the environment and the config of one command."""

    options: argparse.Namespace
    variables: Mapping[str, str]
    config: Config

    def find(self, name: str, *, environment: bool = True, flags_only: bool = False) -> Given | None:
        """Return the first of the flag, the variable and the config's entry that is there."""
        flag = getattr(self.options, name)
        if isinstance(flag, bool):  # --cpu and --no-cpu
            spelled = flag_of(name) if flag else f"--no-{name}"
            return Given(str(flag).lower(), spelled, spelled)
        if flag is not None:
            return Given(flag, flag_of(name), f"{flag_of(name)} {flag}")
        variable = VARIABLE_OF.get(name, "")
        if environment and not flags_only and (text := self.variables.get(variable)):
            return Given(text, variable, f"{variable}={text}")
        if flags_only or (entry := self.config.values.get(name)) is None:
            return None
        return Given(entry.text, entry.where, f"{entry.where}: {name}: {entry.text}")

    def on_cpu(self) -> bool:
        """Return whether --cpu or the config asks for the CPU (ValueError if the config's word is unknown)."""
        given = self.find("cpu")
        if given is None:
            return False
        if given.text.lower() not in ("true", "false"):
            raise ValueError(f"{given.label}: expected true or false.")
        return given.text.lower() == "true"

    def check_names(self, check: NameCheck, settings: Mapping[str, LaunchSetting]) -> dict[str, LaunchSetting]:
        """Return the settings with the Trainer's name of the precision.

        Raises:
            ValueError: a strategy or a precision is unknown. The message has the config's line if it is there.
        """
        num_processes = settings["devices"].value * settings["num_nodes"].value
        precision = None
        for name in ("strategy", "precision"):
            given = self.find(name)
            names = {"strategy": None, "precision": None, name: given.text if given is not None else None}
            try:
                precision = check(names["strategy"], names["precision"], num_processes)
            except ValueError as error:
                if given is None or given.source == FLAGS[name]:
                    raise
                raise ValueError(f"{given.source}: {error}") from error
        return {**settings, "precision": settings["precision"]._replace(value=precision)}
