"""Where the loggers of a run stand, for its checkpoints, and how the loggers of a later run go on from there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import fsspec

from trainwright.loggers.base import Logger
from trainwright.loggers.folder import FolderLogger

CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints in a logger's folder of the run."""


def logger_states(loggers: Sequence[Logger]) -> list[dict[str, Any]]:
    """Return where the loggers stand, as plain data. Rank 0's; what goes before it is written when this returns."""
    states = [(type(logger).__name__, logger.state_dict()) for logger in loggers]
    return [{"class": name, "state": state} for name, state in states if state]


def match_states(loggers: Sequence[Logger], states: Sequence[dict[str, Any]], path: str) -> list[int | None]:
    """Return, for each logger, which of a checkpoint's states it goes on from: its place, -1 for the folder alone, or None.

    A logger takes the state of one of its class. Where it keeps a folder, it does so only if that is the folder of a run of
    its own save_dir and name: the one that it has (an earlier run of the trainer, or its version), or, where the version is
    open, any. The checkpoint may have been moved together with its run folder. Other loggers begin as in a fresh run.
    Rank 0's: it looks at the folders.
    """
    taken: set[int] = set()
    matches: list[int | None] = []
    for logger in loggers:
        match = None
        for place, each in enumerate(states):
            if place not in taken and each["class"] == type(logger).__name__ and _fits(logger, each["state"], path):
                match = place
                taken.add(place)
                break
        if match is None and isinstance(logger, FolderLogger) and run_of(path, logger) is not None:
            match = -1  # of a run that had other loggers
        matches.append(match)
    return matches


def resume_loggers(
    loggers: Sequence[Logger], states: Sequence[dict[str, Any]], path: str, matches: Sequence[int | None]
) -> None:
    """Let the loggers go on as `match_states` has found; before they are started, on every rank."""
    for logger, match in zip(loggers, matches, strict=True):
        if match is not None and match >= 0:
            logger.load_state_dict(states[match]["state"])
        elif match is not None and isinstance(logger, FolderLogger):
            logger.load_state_dict({"version": run_of(path, logger)})


def _fits(logger: Logger, state: dict[str, Any], path: str) -> bool:
    if not isinstance(logger, FolderLogger):
        return True
    folder = logger.folder_of(state["version"])
    is_its = _same(folder, state["folder"]) or lies_in(path, logger, folder)
    return is_its and any(_same(folder, own) for own in logger.run_folders())


def run_of(path: str, logger: FolderLogger) -> int | None:
    """Return the number of the run in whose folder a checkpoint has its default place, if the logger's version is open."""
    if logger.version is not None:
        return None
    numbers = (re.fullmatch(r"version_(\d+)", part) for part in reversed(path.split("/")))
    number = next((int(each[1]) for each in numbers if each), None)
    return number if number is not None and lies_in(path, logger, logger.folder_of(number)) else None


def lies_in(path: str, logger: FolderLogger, folder: str) -> bool:
    """Return whether a checkpoint has its default place in a run's folder."""
    return _same(path.rstrip("/").rpartition("/")[0], f"{logger.log_dir_in(folder)}/{CHECKPOINTS}")


def _same(left: str, right: str) -> bool:
    return bool(left) and str(fsspec.core.url_to_fs(left)[1]).rstrip("/") == str(
        fsspec.core.url_to_fs(right)[1]
    ).rstrip("/")
