"""Run folders: finds the folders of runs."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from typing import Any

import fsspec

from trainwright.loggers.files import CHECKPOINTS, TABLE_NAME
from trainwright.loggers.run_files import EVENTS, listing
from trainwright.loggers.run_record import RECORD_NAME

DEEPEST = 12
"""The levels of folders that are searched."""


def find_runs(root: str) -> list[str]:
    """Return the folders of runs at and below a folder, by name and number. Links and hidden folders are skipped."""
    filesystem, inside = fsspec.core.url_to_fs(root)
    paths = (path[len(inside) :].strip("/") for path in _runs(filesystem, inside))
    runs = (f"{root.rstrip('/')}/{path}" if path else root for path in paths)
    # version_10 comes after version_9.
    return sorted(
        runs, key=lambda run: [(part.isdigit(), len(part) * part.isdigit(), part) for part in re.split(r"(\d+)", run)]
    )


def is_run(folder: str) -> bool:
    """Return whether a folder contains files of a folder logger."""
    names = [name for name, _ in listing(*fsspec.core.url_to_fs(folder))]
    return any(name in (RECORD_NAME, TABLE_NAME) or name.startswith(EVENTS) for name in names)


def check_run(folder: str) -> None:
    """Raise ValueError if a path is not the folder of a run."""
    filesystem, inside = fsspec.core.url_to_fs(folder)
    if filesystem.isdir(inside) and is_run(folder):
        return
    runs = find_runs(folder) if filesystem.isdir(inside) else []
    if not filesystem.exists(inside):
        problem = "it does not exist"
    elif not filesystem.isdir(inside):
        problem = "it is a file"
    else:
        problem = f"it contains {len(runs)} of them" if runs else f"it has no {TABLE_NAME} and no event files"
    parts = folder.rstrip("/").split("/")
    above = (path for end in range(len(parts) - 1, 1, -1) if is_run(path := "/".join(parts[:end])))
    nearest = runs[-1] if runs else next(above, None)
    hint = f" Did you mean {nearest}?" if nearest else ""
    raise ValueError(
        f"{folder} is not a run folder: {problem}. A run folder is one that CSVLogger or TensorBoardLogger writes, with "
        f"{TABLE_NAME} or event files in it.{hint}"
    )


def _runs(filesystem: Any, inside: str, depth: int = 0, is_within: bool = False) -> Iterator[str]:
    """Yield the folders of runs. A run that `is_within` another needs a record or a table: writers have inner folders."""
    listed = list(listing(filesystem, inside))
    files = {name for name, is_folder in listed if not is_folder}
    if inside.endswith(".ckpt"):
        return  # a checkpoint, which may contain a copy of a table
    has_events = not is_within and any(name.startswith(EVENTS) for name in files)
    if RECORD_NAME in files or has_events or (TABLE_NAME in files and _is_table(filesystem, f"{inside}/{TABLE_NAME}")):
        is_within = True
        yield inside
    skipped = CHECKPOINTS if is_within else ""
    folders = [name for name, is_folder in listed if is_folder and name != skipped and not name.startswith(".")]
    for name in folders if depth < DEEPEST else ():
        yield from _runs(filesystem, f"{inside.rstrip('/')}/{name}", depth + 1, is_within)


def _is_table(filesystem: Any, path: str) -> bool:
    """Return whether a table has a column step, or cannot be read: other programs use its name too."""
    try:
        with filesystem.open(path, "rb") as file:
            head = bytes(file.read(1 << 16)).partition(b"\n")[0]
        return not head or "step" in next(csv.reader([head.decode("utf-8", "replace")]))
    except OSError:
        return True  # the reader will name the problem
    except csv.Error:
        return False
