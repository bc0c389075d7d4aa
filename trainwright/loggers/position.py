"""The positions of a run's loggers in its checkpoints, and how the loggers of a resumed run continue there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import fsspec

from trainwright.faults.failing_loggers import outlived
from trainwright.loggers.base import Logger
from trainwright.loggers.files import CHECKPOINTS
from trainwright.loggers.folder import FolderLogger
from trainwright.loggers.remote import RemoteLogger
from trainwright.loggers.run_record import find_record

__all__ = ["CHECKPOINTS"]


def logger_states(loggers: Sequence[Logger]) -> list[dict[str, Any]]:
    """Return the positions of the loggers as plain data, after writing all earlier rows. On rank 0."""
    states = [(type(logger).__name__, outlived(logger, "state_dict")) for logger in loggers]
    return [{"class": name, "state": state} for name, state in states if state]


def match_states(loggers: Sequence[Logger], states: Sequence[dict[str, Any]], path: str) -> list[int | None]:
    """Return the index of every logger's state in the checkpoint, -1 for its folder only, or None.

    A logger resumes from a state of its class. A folder logger also needs the state's folder to be a run folder under its
    save_dir and name: its current folder, if it has one, or any. The checkpoint may have been moved together with its run
    folder. Other loggers start a new run. On rank 0, since it reads the folders.
    """
    matches: list[int | None] = []
    for logger in loggers:
        of_class = [index for index, state in enumerate(states) if state["class"] == type(logger).__name__]
        fitting = (index for index in of_class if index not in matches and _fits(logger, states[index]["state"], path))
        match = next(fitting, None)
        if match is None and isinstance(logger, FolderLogger) and run_of(path, logger) is not None:
            match = -1  # the run had other loggers
        matches.append(match)
    return matches


def resume_loggers(
    loggers: Sequence[Logger], states: Sequence[dict[str, Any]], path: str, matches: Sequence[int | None]
) -> None:
    """Load the states of `match_states`, before the loggers start. On every rank."""
    for logger, match in zip(loggers, matches, strict=True):
        if match is not None and match >= 0:
            logger.load_state_dict(states[match]["state"])
        elif match is not None and isinstance(logger, FolderLogger):
            logger.load_state_dict({"version": run_of(path, logger)})


def refuse_branch(loggers: Sequence[Logger], states: Sequence[dict[str, Any]], path: str) -> None:
    """Reject the run of a service for a fit that resumes from an older checkpoint of that run. On rank 0.

    Raises:
        ValueError: the service would store the steps after the checkpoint twice, since its rows cannot be removed.
    """
    for logger in loggers:
        ids = [state["state"].get("id") for state in states if state["class"] == type(logger).__name__]
        if isinstance(logger, RemoteLogger) and logger.given_id in ids:
            raise ValueError(
                f"{type(logger).__name__} got the run {logger.given_id!r}, which saved {path} and has later rows. Its service "
                "would store the later steps twice. Omit the id, so that the fit begins a new run, or resume from the newest "
                "checkpoint."
            )


def _fits(logger: Logger, state: dict[str, Any], path: str) -> bool:
    if not isinstance(logger, FolderLogger):
        return True
    folder = logger.folder_of(state["version"])
    # A checkpoint of another run may name the same folder, for example if both ran in containers.
    saved_to = getattr(find_record(folder).record, "checkpoint_folders", lambda _: ())(folder)
    inside = str(fsspec.core.url_to_fs(folder)[1]).rstrip("/")
    is_known = not saved_to or any(_is_same(path.rstrip("/").rpartition("/")[0], other) for other in saved_to)
    is_its = lies_in(path, logger, folder) or (inside == state["folder"].rstrip("/") and is_known)
    return is_its and any(_is_same(folder, other) for other in logger.run_folders())


def run_of(path: str, logger: FolderLogger) -> int | None:
    """Return the number of the run whose default folder contains a checkpoint, or None if the version is known."""
    if logger.has_version:
        return None
    numbers = (re.fullmatch(r"version_(\d+)", part) for part in reversed(path.split("/")))
    number = next((int(match[1]) for match in numbers if match), None)
    return number if number is not None and lies_in(path, logger, logger.folder_of(number)) else None


def lies_in(path: str, logger: FolderLogger, folder: str) -> bool:
    """Return whether a checkpoint is in the default folder of a run."""
    return _is_same(path.rstrip("/").rpartition("/")[0], f"{logger.log_dir_in(folder)}/{CHECKPOINTS}")


def _is_same(left: str, right: str) -> bool:
    first, second = (str(fsspec.core.url_to_fs(path)[1]).rstrip("/") for path in (left, right))
    return bool(left) and first == second
