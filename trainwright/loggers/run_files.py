"""Run files: finds the folders of runs, and reads the logged values of a run from its files."""

from __future__ import annotations

import csv
import io
import posixpath
import re
import struct
import zlib
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import fsspec
import numpy as np

from trainwright.history import History, Numbers, Series
from trainwright.loggers.files import CHECKPOINTS, TABLE_NAME, filesystem_of
from trainwright.loggers.run_record import RECORD_NAME

__all__ = ["EVENTS", "find_runs", "listing", "read_history"]

EVENTS = "events.out.tfevents."
"""The prefix of the names of event files."""
LONGEST_EVENT = 1 << 20
"""The bytes of an event with numbers. Longer ones have images."""
FIRST_EVENTS = 4
"""Events at the beginning of a file that are always read: they mark the start of a resumed run."""
DEEPEST = 12
"""The levels of folders that are searched for runs."""
ROWS_AT_ONCE = 500
"""Rows that are text at the same time. More would outlive young garbage collections, and cause full ones."""


def read_history(folder: str, *, kind: str = "", log_dir: str | None = None, most_bytes: int | None = None) -> History:
    """Return the values that a run has logged, from its table or its event files.

    Event files in several folders come from several writers. An inner folder is part of the name, as in "eval/loss".

    Args:
        folder: the run's folder.
        kind: prefer the files of a kind of logger, "csv" or "tensorboard".
        log_dir: the folder of the event files, by default the run's folder.
        most_bytes: skip a larger table, thin larger event files evenly, and name them in the problems.

    Raises:
        ValueError: a file has another format.
        ImportError: there are only event files, and tensorboard is not installed.
    """
    filesystem, inside = filesystem_of(folder)
    has_table = filesystem.isfile(f"{inside}/{TABLE_NAME}")
    events = list(_event_files(filesystem, inside if log_dir is None else fsspec.core.url_to_fs(log_dir)[1]))
    if events and (kind == "tensorboard" or not has_table):
        return _of_events(folder, filesystem, events, most_bytes)
    if not has_table:  # a run that has logged nothing yet
        is_other = filesystem.exists(f"{inside}/{TABLE_NAME}")
        return History(folder, {}, problems=(f"{folder}/{TABLE_NAME} is not a file.",) if is_other else ())
    if most_bytes is not None and (size := filesystem.size(f"{inside}/{TABLE_NAME}")) > most_bytes:
        problem = f"{folder}/{TABLE_NAME} is long ({size / 2**20:,.0f} MiB), so it was not read."
        return History(folder, {}, problems=(f"{problem} `trainwright plot {folder}` draws its curves.",))
    with filesystem.open(f"{inside}/{TABLE_NAME}", "rb") as file:
        return _of_table(folder, file)


# -- metrics.csv -----------------------------------------------------------------------------------------------------------


def _of_table(folder: str, file: Any) -> History:
    """Read a table in parts, so that a long table needs little memory."""
    path = f"{folder}/{TABLE_NAME}"
    problems: list[str] = []
    names: list[str] = []
    columns: dict[str, list[Numbers]] = {}
    """The steps and values of each metric, in parts."""
    damaged = without_step = 0
    try:
        for rows in _rows_of(file):
            if not names:
                names, *rows = rows
                if "step" not in names:
                    raise ValueError("it has no column step")
            whole = [row for row in rows if len(row) == len(names)]
            damaged += len(rows) - len(whole)
            cells = dict(zip(names, zip(*whole, strict=True), strict=True)) if whole else {}
            at, numbers = _numbers(cells.pop("step", ()))
            steps, has_step = np.zeros(len(whole)), np.zeros(len(whole), bool)
            steps[at], has_step[at] = numbers, True
            without_step += len(whole) - len(at)
            for name, column in cells.items():
                at, values = _numbers(column)
                if (is_usable := has_step[at]).any():
                    columns.setdefault(name, []).append(np.stack([steps[at[is_usable]], values[is_usable]]))
    except (ValueError, csv.Error) as error:  # UnicodeDecodeError among them
        raise ValueError(f"{path} is not a table of a CSVLogger: {error}. Pass the folder of another run.") from error
    problems += [f"{path}: {damaged} damaged rows were skipped."] if damaged else []
    problems += [f"{path}: {without_step} rows without a step were skipped."] if without_step else []
    epochs = np.concatenate(columns.pop("epoch", [np.empty((2, 0))]), axis=1).T
    series = {name: _series(*np.concatenate(columns[name], axis=1)) for name in names if name in columns}
    return History(folder, series, epochs, tuple(problems))


def _rows_of(file: Any) -> Iterator[list[list[str]]]:
    """Yield the rows of a table, several at once, without the unfinished last row of a killed process."""
    reader = csv.reader(line.decode() for line in file if line.endswith(b"\n"))
    while rows := list(islice(reader, ROWS_AT_ONCE)):
        yield rows


def _numbers(cells: Any) -> tuple[Any, Numbers]:
    """Return the indices of the cells with numbers, and the numbers. Other texts are skipped."""
    at = np.flatnonzero(np.fromiter(map(bool, cells), bool, len(cells)))
    try:
        return at, np.fromiter(map(float, filter(None, cells)), float, len(at))
    except ValueError:
        numbers = {index: value for index in at if (value := _number(cells[index])) is not None}
    return np.array([*numbers], int), np.array([*numbers.values()], float)


def _number(cell: str) -> float | None:
    if cell in ("True", "False"):
        return float(cell == "True")
    try:
        return float(cell)
    except ValueError:
        return None


def _series(steps: Numbers, values: Numbers) -> Series:
    order = np.argsort(steps, kind="stable")
    return Series(steps[order], values[order])


# -- event files -----------------------------------------------------------------------------------------------------------


def _of_events(folder: str, filesystem: Any, paths: list[str], most_bytes: int | None) -> History:
    problems: list[str] = []
    series: dict[str, Series] = {}
    epochs: list[tuple[float, float]] = []
    folders = sorted({posixpath.dirname(path) for path in paths})
    top = posixpath.commonpath(folders)
    for inner in folders:
        rows: list[tuple[int, dict[str, float]]] = []
        for path in sorted(path for path in paths if posixpath.dirname(path) == inner):
            for step, values, is_start in _events_of(filesystem, path, problems, most_bytes):
                if is_start:  # of a resumed run, which writes the later rows again
                    rows = [row for row in rows if row[0] < step]
                elif values:
                    rows.append((step, values))
        epochs += [(step, values["epoch"]) for step, values in rows if "epoch" in values]
        series |= _columns(rows, inner[len(top) :].strip("/"))
    return History(folder, series, np.array(epochs, float).reshape(-1, 2), tuple(problems))


def _columns(rows: list[tuple[int, dict[str, float]]], inner: str) -> dict[str, Series]:
    """Return the series of one folder's rows. The name of an inner folder comes first."""
    columns: dict[str, list[tuple[float, float]]] = {}
    for step, values in rows:
        for name, value in values.items():
            if name not in ("epoch", "step") and not (inner and name == "hp_metric"):
                columns.setdefault(f"{inner}/{name}" if inner else name, []).append((step, value))
    return {name: _series(*np.array(column).T) for name, column in columns.items()}


def _events_of(
    filesystem: Any, path: str, problems: list[str], most_bytes: int | None
) -> Iterator[tuple[int, dict[str, float], bool]]:
    """Yield the step and numbers of the events of a file, and whether they mark a start.

    A record of the file is the length in 8 bytes, its checksum in 4, the event, and its checksum in 4.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            f'{path} is read with tensorboard: pip install "trainwright[tensorboard]", or log with a CSVLogger.'
        ) from error
    with filesystem.open(path, "rb") as file:
        size, at = file.seek(0, io.SEEK_END), 0
        every = 1 if most_bytes is None else -(-size // most_bytes)
        if every > 1:
            problems.append(f"{path} is long ({size / 2**20:,.0f} MiB): one of {every} values was read.")
        file.seek(0)
        for number in count():
            if at + 12 > size:
                return
            (length,) = struct.unpack_from("<Q", file.read(12))
            at += 16 + length
            if at > size:
                break  # an unfinished record of a running or killed process
            if length > LONGEST_EVENT:
                file.seek(at)
                continue
            data = file.read(length + 4)[:length]
            # Chosen by the bytes: every n-th event might always be of the same metric.
            if number >= FIRST_EVENTS and zlib.crc32(data) % every:
                continue
            try:
                event = Event.FromString(data)
            except Exception:  # protobuf's DecodeError
                problems.append(f"{path} is damaged after {at - 16 - length:,} bytes, and the rest was skipped.")
                return
            numbers = (value for value in event.summary.value if value.WhichOneof("value") == "simple_value")
            values = {value.tag: value.simple_value for value in numbers}
            yield event.step, values, event.session_log.status == SessionLog.START


# -- folders --------------------------------------------------------------------------------------------------------------


def find_runs(root: str) -> list[str]:
    """Return the folders of runs at and below a folder, by name and number. Links and hidden folders are skipped."""
    filesystem, inside = fsspec.core.url_to_fs(root)
    paths = (path[len(inside) :].strip("/") for path in _runs(filesystem, inside))
    runs = (f"{root.rstrip('/')}/{path}" if path else root for path in paths)
    # version_10 comes after version_9.
    return sorted(runs, key=lambda run: [(x.isdigit(), len(x) * x.isdigit(), x) for x in re.split(r"(\d+)", run)])


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


def _event_files(filesystem: Any, inside: str, depth: int = 0) -> Iterator[str]:
    """Yield the event files of a run and its `sub_dir`, but not of another run within it."""
    listed = list(listing(filesystem, inside))
    if depth and any(name in (RECORD_NAME, TABLE_NAME) for name, _ in listed):
        return
    for name, is_folder in listed:
        if not is_folder and name.startswith(EVENTS):
            yield f"{inside}/{name}"
        elif is_folder and depth < 3 and not name.endswith(".ckpt") and name != CHECKPOINTS:
            yield from _event_files(filesystem, f"{inside}/{name}", depth + 1)


def listing(filesystem: Any, inside: str) -> Iterator[tuple[str, bool]]:
    """Yield the names in a folder without links, and whether they are folders. Unreadable folders count as empty."""
    filesystem.invalidate_cache()
    try:
        entries = filesystem.ls(inside, detail=True)
    except OSError:
        return
    for entry in sorted(entries, key=lambda entry: str(entry["name"])):
        name = str(entry["name"]).rstrip("/").rpartition("/")[2]
        if name and not entry.get("islink") and entry["type"] in ("file", "directory"):
            yield name, entry["type"] == "directory"
