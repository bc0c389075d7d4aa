"""Run files: which folders are those of runs, and what the files in them say that was logged."""

from __future__ import annotations

import csv
import io
import posixpath
import re
import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import fsspec
import numpy as np

from trainwright.loggers.files import CHECKPOINTS, TABLE_NAME
from trainwright.loggers.history import History, Numbers, Series
from trainwright.loggers.run_record import RECORD_NAME

__all__ = ["find_runs", "read_history"]

EVENTS = "events.out.tfevents."
"""How the names of event files begin."""
DEEPEST = 12
"""Levels of folders that are searched."""
BLOCK_BYTES = 1 << 20
"""What is read of a file at once."""
ROWS_AT_ONCE = 500
"""Rows that are held as texts: more would outlive the collections of young objects, and make all objects be collected."""


def find_runs(root: str) -> list[str]:
    """Return the folders of runs at and below a folder, by name and number; links and hidden folders are left out."""
    filesystem, inside = fsspec.core.url_to_fs(root)
    found = [
        root if at == inside else f"{root.rstrip('/')}/{at[len(inside) :].strip('/')}"
        for at in _runs(filesystem, inside)
    ]
    return sorted(found, key=_natural)


def is_run(folder: str) -> bool:
    """Return whether a folder holds what a folder logger writes."""
    filesystem, inside = fsspec.core.url_to_fs(folder)
    return _has_run(name for name, _ in _listing(filesystem, inside))


def refuse_other(folder: str) -> None:
    """Refuse a path that is not the folder of a run, with what to give instead (ValueError)."""
    filesystem, inside = fsspec.core.url_to_fs(folder)
    accepted = f"A run folder is one that CSVLogger or TensorBoardLogger writes, with {TABLE_NAME} or event files in it"
    if not filesystem.exists(inside):
        raise ValueError(f"{folder} is not a run folder: it does not exist. {accepted}.")
    if not filesystem.isdir(inside):
        parent = posixpath.dirname(folder.rstrip("/")) or "."
        hint = f"; give {parent}" if is_run(parent) else ""
        raise ValueError(f"{folder} is not a run folder: it is a file. {accepted}{hint}.")
    if is_run(folder):
        return
    within = find_runs(folder)
    above = next((each for each in _parents(folder) if is_run(each)), None)
    hint = f"; did you mean {within[-1]}?" if within else f"; did you mean {above}, which it is in?" if above else "."
    count = f"it holds {len(within)} of them" if within else f"it has no {TABLE_NAME} and no event files"
    raise ValueError(f"{folder} is not a run folder: {count}. {accepted}{hint}")


def read_history(
    folder: str, *, with_times: bool = False, kind: str = "", log_dir: str | None = None, most_bytes: int | None = None
) -> History:
    """Return what a run has logged: by its table, or else, or `with_times`, by its event files.

    Event files in several folders are those of several writers: what is in an inner folder is named by it, as in "eval/loss".
    `kind` prefers the files of one kind of logger ("csv" or "tensorboard"), if they are there; `log_dir` is the folder in the
    run's whose event files are read. Of a table or an event file with more than `most_bytes`, evenly spaced rows are read,
    which the problems name.

    Raises:
        ValueError: it is not the folder of a run, or a file in it is not what it seems.
        ImportError: there are event files alone, and tensorboard is not installed.
    """
    refuse_other(folder)
    filesystem, inside = fsspec.core.url_to_fs(folder)
    has_table = filesystem.isfile(f"{inside}/{TABLE_NAME}")
    events = list(_event_files(filesystem, inside if log_dir is None else fsspec.core.url_to_fs(log_dir)[1]))
    if events and (with_times or kind == "tensorboard" or not has_table):
        return _of_events(folder, filesystem, events, most_bytes)
    if not has_table:  # a run that has logged nothing yet
        is_other = filesystem.exists(f"{inside}/{TABLE_NAME}")
        return History(folder, {}, problems=(f"{folder}/{TABLE_NAME} is not a file.",) if is_other else ())
    with filesystem.open(f"{inside}/{TABLE_NAME}", "rb") as file:
        return _of_table(folder, file, most_bytes)


# -- metrics.csv -----------------------------------------------------------------------------------------------------------


class Column:
    """The numbers of one column of a table, and the steps of their rows, in parts."""

    def __init__(self) -> None:
        self._steps: list[Numbers] = []
        self._values: list[Numbers] = []

    def add(self, steps: Numbers, values: Numbers) -> None:
        self._steps.append(steps)
        self._values.append(values)

    def whole(self) -> tuple[Numbers, Numbers]:
        return np.concatenate(self._steps), np.concatenate(self._values)


def _of_table(folder: str, file: Any, most_bytes: int | None) -> History:
    """Read a table in blocks, so that a long one needs little memory."""
    path = f"{folder}/{TABLE_NAME}"
    problems: list[str] = []
    names: list[str] = []
    columns: dict[str, Column] = {}
    damaged = without_step = 0
    try:
        for rows in _rows_of(file, path, most_bytes, problems):
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
                if (kept := has_step[at]).any():
                    columns.setdefault(name, Column()).add(steps[at[kept]], values[kept])
    except (ValueError, csv.Error) as error:  # UnicodeDecodeError among them
        raise ValueError(f"{path} is not a table of a CSVLogger: {error}. Give the folder of another run.") from error
    problems += [f"{path}: {damaged} damaged rows were left out."] if damaged else []
    problems += [f"{path}: {without_step} rows without a step were left out."] if without_step else []
    epochs = columns.pop("epoch", None)
    series = {name: _series(*columns[name].whole()) for name in names if name in columns}
    table = np.empty((0, 2)) if epochs is None else np.stack(epochs.whole(), axis=1)
    return History(folder, series, table, tuple(problems))


def _rows_of(file: Any, path: str, most_bytes: int | None, problems: list[str]) -> Iterator[list[list[str]]]:
    """Yield the rows of a table, some at once."""
    for text in _blocks_of(file, path, most_bytes, problems):
        reader = csv.reader(io.StringIO(text, newline=""))
        while rows := list(islice(reader, ROWS_AT_ONCE)):
            yield rows


def _blocks_of(file: Any, path: str, most_bytes: int | None, problems: list[str]) -> Iterator[str]:
    """Yield the rows of a table in blocks, without a last one that a killed process did not finish."""
    size = file.seek(0, io.SEEK_END)
    count = max(2, (most_bytes or 0) // BLOCK_BYTES)
    if most_bytes is not None and size > max(most_bytes, count * BLOCK_BYTES):
        part, all_of_it = (f"{each / 2**20:,.0f} MiB" for each in (count * BLOCK_BYTES, size))
        problems.append(f"{path} is long: {part} of its {all_of_it} were read, in {count} evenly spaced parts.")
        starts = [(size - BLOCK_BYTES) * number // (count - 1) for number in range(count)]
    else:
        starts = list(range(0, size, BLOCK_BYTES))
    rest, end = b"", 0
    for start in starts:
        file.seek(start)
        block = file.read(BLOCK_BYTES)
        # After a gap, the block begins within a row.
        data = rest + block if start == end else block[block.find(b"\n") + 1 :]
        end = start + len(block)
        last = data.rfind(b"\n") + 1
        rest = data[last:]
        if last:
            yield data[:last].decode("utf-8")


def _numbers(cells: Any) -> tuple[Any, Numbers]:
    """Return which cells of a column hold a number, by their index, and the numbers; an empty cell and a text hold none."""
    at = np.flatnonzero(np.fromiter(map(bool, cells), bool, len(cells)))
    try:
        return at, np.fromiter(map(float, filter(None, cells)), float, len(at))
    except ValueError:
        found = [(number, value) for number in at if (value := _number(cells[number])) is not None]
    return np.array([number for number, _ in found], int), np.array([value for _, value in found], float)


def _number(cell: str) -> float | None:
    if cell in ("True", "False"):
        return float(cell == "True")
    try:
        return float(cell)
    except ValueError:
        return None


def _series(steps: Numbers, values: Numbers, times: Numbers | None = None) -> Series:
    order = np.argsort(steps, kind="stable")
    return Series(steps[order], values[order], None if times is None else times[order])


# -- event files -----------------------------------------------------------------------------------------------------------


def _of_events(folder: str, filesystem: Any, paths: list[str], most_bytes: int | None) -> History:
    problems: list[str] = []
    series: dict[str, Series] = {}
    epochs: list[tuple[float, float]] = []
    folders = sorted({posixpath.dirname(each) for each in paths})
    top = posixpath.commonpath(folders)
    for each in folders:
        rows: list[tuple[int, float, dict[str, float]]] = []
        for path in sorted(path for path in paths if posixpath.dirname(path) == each):
            for step, time, values, is_start in _events_of(filesystem, path, problems, most_bytes):
                if is_start:  # of a run that was resumed, which writes what follows again
                    rows = [row for row in rows if row[0] < step]
                elif values:
                    rows.append((step, time, values))
        epochs += [(row[0], row[2]["epoch"]) for row in rows if "epoch" in row[2]]
        series |= _columns(rows, each[len(top) :].strip("/"))
    return History(folder, series, np.array(epochs, float).reshape(-1, 2), tuple(problems))


def _columns(rows: list[tuple[int, float, dict[str, float]]], inner: str) -> dict[str, Series]:
    """Return the series of one folder's rows, named by that folder if it is an inner one."""
    columns: dict[str, list[tuple[float, float, float]]] = {}
    for step, time, values in rows:
        for name, value in values.items():
            if name not in ("epoch", "step") and not (inner and name == "hp_metric"):
                columns.setdefault(f"{inner}/{name}" if inner else name, []).append((step, time, value))
    tables = {name: np.array(column) for name, column in columns.items()}
    return {name: _series(table[:, 0], table[:, 2], table[:, 1]) for name, table in tables.items()}


def _events_of(
    filesystem: Any, path: str, problems: list[str], most_bytes: int | None
) -> Iterator[tuple[int, float, dict[str, float], bool]]:
    """Yield the step, time and numbers of each event of a file, and whether it marks a start.

    The file is a sequence of records: the length in 8 bytes, 4 of its checksum, the event, 4 of its checksum.
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
            problems.append(f"{path} is long, with {size / 2**20:,.0f} MiB: of {every} values of it one was read.")
        file.seek(0)
        while at + 12 <= size:
            (length,) = struct.unpack_from("<Q", file.read(12))
            at += 16 + length
            if at > size:
                break  # a record that a running process has not finished, or a killed one never will
            if length > BLOCK_BYTES:  # an image, say
                file.seek(at)
                continue
            data = file.read(length + 4)[:length]
            # By its bytes, since metrics that are written in turn would all be left out but one.
            if every > 1 and zlib.crc32(data) % every and _is_summary(data):
                continue
            try:
                event = Event.FromString(data)
            except Exception:  # protobuf's DecodeError
                problems.append(f"{path} is damaged after {at - 16 - length:,} bytes; what follows was left out.")
                return
            values = {
                each.tag: each.simple_value
                for each in event.summary.value
                if each.WhichOneof("value") == "simple_value"
            }
            yield event.step, event.wall_time, values, event.session_log.status == SessionLog.START


def _is_summary(event: bytes) -> bool:
    """Return whether an event holds values, by its bytes: the time takes 9, then come the step, a number of any length, and
    the tag of the contents."""
    at = 9
    if event[at : at + 1] == b"\x10":
        at += 1
        while at < len(event) and event[at] & 0x80:
            at += 1
        at += 1
    return event[at : at + 1] == b"\x2a"


# -- folders ---------------------------------------------------------------------------------------------------------------


def _runs(filesystem: Any, inside: str, depth: int = 0, is_within: bool = False) -> Iterator[str]:
    """Yield the folders of runs; one that `is_within` another's needs a record or a table, since writers use inner folders."""
    listed = list(_listing(filesystem, inside))
    files = {name for name, is_folder in listed if not is_folder}
    if inside.endswith(".ckpt") and files and RECORD_NAME not in files:
        return  # a checkpoint, which may hold a copy of a table
    if (
        RECORD_NAME in files
        or (TABLE_NAME in files and _is_table(filesystem, f"{inside}/{TABLE_NAME}"))
        or (not is_within and any(name.startswith(EVENTS) for name in files))
    ):
        is_within = True
        yield inside
    for name, is_folder in listed if depth < DEEPEST else ():
        if is_folder and not name.startswith(".") and not (is_within and name == CHECKPOINTS):
            yield from _runs(filesystem, f"{inside.rstrip('/')}/{name}", depth + 1, is_within)


def _is_table(filesystem: Any, path: str) -> bool:
    """Return whether a file may be a CSVLogger's: others have tables of this name too, but few with a column step."""
    try:
        with filesystem.open(path, "rb") as file:
            head = bytes(file.read(1 << 16)).partition(b"\n")[0]
        return not head or "step" in next(csv.reader([head.decode("utf-8", "replace")]))
    except OSError:
        return True  # what is listed says why it cannot be read
    except csv.Error:
        return False


def _has_run(names: Iterator[str]) -> bool:
    return any(name in (RECORD_NAME, TABLE_NAME) or name.startswith(EVENTS) for name in names)


def _event_files(filesystem: Any, inside: str, depth: int = 0) -> Iterator[str]:
    """Yield the event files of a run, also those in a `sub_dir`, but not those of a run within it."""
    listed = list(_listing(filesystem, inside))
    if depth and any(name in (RECORD_NAME, TABLE_NAME) for name, _ in listed):
        return
    for name, is_folder in listed:
        if not is_folder and name.startswith(EVENTS):
            yield f"{inside}/{name}"
        elif is_folder and depth < 3 and not name.endswith(".ckpt") and name != CHECKPOINTS:
            yield from _event_files(filesystem, f"{inside}/{name}", depth + 1)


def _listing(filesystem: Any, inside: str) -> Iterator[tuple[str, bool]]:
    """Yield the names in a folder and whether each is a folder, without links; none if it cannot be read."""
    filesystem.invalidate_cache()
    try:
        entries = filesystem.ls(inside, detail=True)
    except OSError:
        return
    for entry in sorted(entries, key=lambda each: str(each["name"])):
        name = str(entry["name"]).rstrip("/").rpartition("/")[2]
        if name and not entry.get("islink") and entry["type"] in ("file", "directory"):
            yield name, entry["type"] == "directory"


def _parents(folder: str) -> Iterator[str]:
    while (parent := posixpath.dirname(folder.rstrip("/"))) not in ("", folder) and not parent.endswith((":", ":/")):
        yield parent
        folder = parent


def _natural(path: str) -> list[tuple[int, int, str]]:
    """Return a key by which version_10 comes after version_9."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", path)]
