"""The positions of a run's loggers in its checkpoints, and how the loggers of a resumed run continue there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import fsspec

from trainwright.loggers.base import Logger
from trainwright.loggers.files import CHECKPOINTS
from trainwright.loggers.folder import FolderLogger
from trainwright.loggers.remote import RemoteLogger

__all__ = ["CHECKPOINTS"]


def logger_states(loggers: Sequence[Logger]) -> list[dict[str, Any]]:
    """Return the loggers' positions as plain data, once everything before them is written. On rank 0."""
    states = [(type(logger).__name__, logger.state_dict()) for logger in loggers]
    return [{"class": name, "state": state} for name, state in states if state]


def match_states(loggers: Sequence[Logger], states: Sequence[dict[str, Any]], path: str) -> list[int | None]:
    """Return, for each logger, the index of the checkpoint's state that it resumes from, -1 for the folder only, or None.

    A logger resumes from the state of one of its class. If it writes into a folder, that has to be a run folder under its
    save_dir and name: the one that it has (from an earlier run of the trainer, or by its version), else any. The checkpoint may
    have been moved together with its run folder. Other loggers start as in a new run. On rank 0: it reads the folders.
    """
    matches: list[int | None] = []
    for logger in loggers:
        own = [index for index, each in enumerate(states) if each["class"] == type(logger).__name__]
        fitting = (index for index in own if index not in matches and _fits(logger, states[index]["state"], path))
        match = next(fitting, None)
        if match is None and isinstance(logger, FolderLogger) and run_of(path, logger) is not None:
            match = -1  # the run had other loggers
        matches.append(match)
    return matches


def resume_loggers(
    loggers: Sequence[Logger], states: Sequence[dict[str, Any]], path: str, matches: Sequence[int | None]
) -> None:
    """Load the states that `match_states` found, before the loggers are started, on every rank."""
    for logger, match in zip(loggers, matches, strict=True):
        if match is not None and match >= 0:
            logger.load_state_dict(states[match]["state"])
        elif match is not None and isinstance(logger, FolderLogger):
            logger.load_state_dict({"version": run_of(path, logger)})


def refuse_branch(loggers: Sequence[Logger], states: Sequence[dict[str, Any]], path: str) -> None:
    """Refuse a service's run, given by its id, for a fit that branches off from an older checkpoint of that run. On rank 0.

    Raises:
        ValueError: the service would have the steps after the checkpoint twice, since what it has cannot be removed.
    """
    for logger in loggers:
        ids = [each["state"].get("id") for each in states if each["class"] == type(logger).__name__]
        if isinstance(logger, RemoteLogger) and logger.given_id in ids:
            raise ValueError(
                f"{type(logger).__name__} was given the run {logger.given_id!r}, in which {path} was saved, and which has "
                "later rows: its service would have the steps from there on twice. Leave out the id, and the fit "
                "begins a new run, or resume from the newest checkpoint."
            )


def _fits(logger: Logger, state: dict[str, Any], path: str) -> bool:
    if not isinstance(logger, FolderLogger):
        return True
    folder = logger.folder_of(state["version"])
    is_its = _is_same(folder, state["folder"]) or lies_in(path, logger, folder)
    return is_its and any(_is_same(folder, own) for own in logger.run_folders())


def run_of(path: str, logger: FolderLogger) -> int | None:
    """Return the number of the run in whose default folder a checkpoint is, unless the logger's version is given."""
    if logger.has_version:
        return None
    numbers = (re.fullmatch(r"version_(\d+)", part) for part in reversed(path.split("/")))
    number = next((int(each[1]) for each in numbers if each), None)
    return number if number is not None and lies_in(path, logger, logger.folder_of(number)) else None


def lies_in(path: str, logger: FolderLogger, folder: str) -> bool:
    """Return whether a checkpoint is in the default folder of a run."""
    return _is_same(path.rstrip("/").rpartition("/")[0], f"{logger.log_dir_in(folder)}/{CHECKPOINTS}")


def _is_same(left: str, right: str) -> bool:
    first, second = (str(fsspec.core.url_to_fs(each)[1]).rstrip("/") for each in (left, right))
    return bool(left) and first == second
