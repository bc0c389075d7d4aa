"""`trainwright runs`: lists the runs in a folder with their state, best values and newest checkpoint."""

from __future__ import annotations

import contextlib
import json
import math
import posixpath
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import fsspec
import numpy as np

from trainwright import CheckpointError
from trainwright.callbacks.checkpoint_policy import monitor_of
from trainwright.checkpoint.discovery import CheckpointEntry, find_candidates, same_path
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.errors import did_you_mean
from trainwright.history import History
from trainwright.launch.cli import Parser
from trainwright.launch.config import printable
from trainwright.loggers.files import CHECKPOINTS
from trainwright.loggers.run_files import find_runs, read_history
from trainwright.loggers.run_record import RunRecord, RunState, find_record
from trainwright.metric_direction import direction_of
from trainwright.paths import absolute
from trainwright.tools.columns import lay_out, terminal_width

NO_VALUE = "-"
HEADS = ("run", "state", "epoch", "step", "best", "newest checkpoint", "written")
MOST_DETAIL = 3
_KNOWN = re.compile(r"(?:loss|acc|accuracy)(?:_epoch)?$", re.IGNORECASE)
"""The metrics whose best values are shown if no ModelCheckpoint monitors one."""


class Best(NamedTuple):
    """The best value of a metric. The step of its row, from 0 in a fit, is None if only a checkpoint has the value."""

    value: float
    mode: str
    step: int | None


@dataclass
class ListedRun:
    """A run in the list."""

    name: str
    """The path of its folder, relative to the listed folder."""
    folder: str
    state: RunState
    record: RunRecord | None
    history: History
    checkpoint: CheckpointEntry | None = None
    monitors: dict[str, str] = field(default_factory=dict)
    """The modes of the metrics that ModelCheckpoints monitor."""
    modes: dict[str, str] = field(default_factory=dict)
    """The modes by which --sort compares runs. They take precedence over `monitors`."""
    scores: dict[str, float] = field(default_factory=dict)
    """The best values in the newest checkpoint, by monitored metric."""
    problems: list[str] = field(default_factory=list)
    written_at: float | None = None

    @property
    def step(self) -> int | None:
        steps = [self.history.last_step]
        steps += [self.record.step] if self.record is not None and self.record.ended is not None else []
        steps += [int(self.checkpoint.step)] if self.checkpoint is not None else []
        return max((step for step in steps if step is not None), default=None)

    @property
    def epoch(self) -> int | None:
        # A test after the training adds a row with the next epoch, so the record comes first.
        if self.record is not None and self.record.ended is not None and self.record.epoch is not None:
            return self.record.epoch
        epochs = [self.history.last_epoch]
        epochs += [self.checkpoint.epoch] if self.checkpoint is not None else []
        return max((epoch for epoch in epochs if epoch is not None), default=None)

    def best_of(self, metric: str) -> Best | None:
        """Return the best value of a metric, or None."""
        modes = {**self.monitors, **self.modes}
        mode = modes.get(metric) or direction_of(metric) or "max"
        # The logger may add a prefix to the name in the callback.
        prefixed = [name for name in self.history.series if metric in modes and name.endswith(f"-{metric}")]
        names = [metric] if metric in self.history.series else prefixed
        series = self.history.series[names[0]] if names else None
        if series is not None and (finite := np.flatnonzero(np.isfinite(series.values))).size:
            values = series.values[finite]
            at = finite[values.argmin() if mode == "min" else values.argmax()]
            return Best(float(series.values[at]), mode, int(series.steps[at]))
        return Best(self.scores[metric], mode, None) if metric in self.scores else None

    @property
    def best(self) -> dict[str, Best]:
        """Return the best values of the monitored metrics, or else of losses and accuracies."""
        names = list(self.monitors)
        if not names:
            names = [name for name in self.history.series if _KNOWN.search(name)]
            names = [name for name in names if re.match(r"val", name, re.IGNORECASE)] or names
        return {name: best for name in names if (best := self.best_of(name)) is not None}


def runs_command(arguments: Sequence[str], _: Any) -> int:
    """Run `trainwright runs` and return its exit code."""
    parser = Parser(
        prog="trainwright runs",
        description="Lists the runs of CSVLogger and TensorBoardLogger in a folder and below it: their state, the best value "
        "of the metric that a ModelCheckpoint monitors, and the newest checkpoint.",
    )
    parser.add_argument("directory", metavar="DIR", help="the folder, such as trainwright_logs")
    sorts = "list the runs with the best values of this metric first; METRIC:min or METRIC:max sets the direction"
    parser.add_argument("--sort", metavar="METRIC", help=sorts)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    sort = None
    try:
        runs = list_runs(options.directory)
        if options.sort is not None:
            sort, mode = _sorting(runs, options.sort)
            runs = _sorted(runs, sort, mode)
    except (ValueError, OSError) as error:
        parser.error(printable(str(error)))
    if options.json:
        print(json.dumps([_as_data(run, sort) for run in runs], indent=2))
        return 0
    if not runs:
        print(
            f"{printable(options.directory)} contains no runs: no folder in it has files of a CSVLogger or a TensorBoardLogger."
        )
        return 0
    print("\n".join(_table(runs, options.directory, sort, terminal_width(sys.stdout))))
    if sort is not None:
        first, other = ("smallest", "max") if mode == "min" else ("largest", "min")
        print(f"Sorted by {printable(sort)}, {first} first. --sort {printable(sort)}:{other} reverses the order.")
    for run in runs:
        for problem in run.problems:
            print(f"{printable(run.name)}: {printable(problem)}")
    return 0


def list_runs(directory: str) -> list[ListedRun]:
    """Return the runs at and below a folder, by name and number; ValueError if it does not exist."""
    root = absolute(directory).rstrip("/") or "/"
    filesystem, inside = fsspec.core.url_to_fs(root)
    if not filesystem.isdir(inside):
        problem = "is a file" if filesystem.exists(inside) else "does not exist"
        raise ValueError(f"{directory} {problem}; pass a folder with runs, such as trainwright_logs.")
    saved = _Saved()
    return [_run(root, folder, saved) for folder in find_runs(root)]


class _Facts(NamedTuple):
    """The run folders of the loggers in a checkpoint, and the states of its callbacks."""

    folders: tuple[str, ...]
    callbacks: Any


class _Saved:
    """Reads the checkpoint folders of a listing only once, since several runs may save into one folder."""

    def __init__(self) -> None:
        self._folders: dict[str, list[CheckpointEntry]] = {}
        self._facts: dict[str, _Facts] = {}

    def in_folder(self, folder: str, problems: list[str]) -> list[CheckpointEntry]:
        """Return the complete checkpoints in a folder. Problems are reported for the first run that asks."""
        if folder not in self._folders:
            entries = []
            try:
                entries = find_candidates(folder)
            except CheckpointError as error:
                problems.append(str(error))
            problems += [f"{entry.path} was skipped: {entry.damage}" for entry in entries if entry.damage]
            self._folders[folder] = [entry for entry in entries if not entry.damage]
        return self._folders[folder]

    def facts_of(self, path: str, problems: list[str]) -> _Facts:
        """Return the facts of a checkpoint, which are empty if it cannot be read."""
        if path not in self._facts:
            state: Mapping[str, Any] = {}
            try:
                state = open_checkpoint(path, "off").run_state()
            except CheckpointError as error:
                problems.append(str(error))
            folders = []
            with contextlib.suppress(TypeError, KeyError, AttributeError):
                folders = [str(logger["state"].get("folder", "")) for logger in state.get("loggers") or []]
            self._facts[path] = _Facts(tuple(folders), state.get("callbacks"))
        return self._facts[path]


def _run(root: str, folder: str, saved: _Saved) -> ListedRun:
    record, _, problem = find_record(folder)
    problems = [f"{problem}."] if problem else []
    try:
        history = read_history(folder)
        problems += history.problems
    except (ValueError, ImportError, OSError) as error:
        history = History(folder, {})
        problems.append(str(error))
    state = record.state if record is not None else RunState("unknown")
    run = ListedRun(folder[len(root) :].strip("/") or ".", folder, state, record, history, problems=problems)
    run.checkpoint = _newest(folder, record, saved, problems)
    if run.checkpoint is not None:
        _take_monitors(run, saved.facts_of(run.checkpoint.path, problems).callbacks)
    run.written_at = _written_at(run)
    return run


def _take_monitors(run: ListedRun, states: Any) -> None:
    """Store the monitored metrics of the ModelCheckpoints in a checkpoint."""
    for key, state in states.items() if isinstance(states, Mapping) else ():
        if monitored := monitor_of(str(key)):
            metric, mode = monitored
            run.monitors[metric] = mode
            score = state.get("best_model_score") if isinstance(state, Mapping) else None
            if isinstance(score, (int, float)) and math.isfinite(score):
                run.scores[metric] = float(score)


def _newest(folder: str, record: RunRecord | None, saved: _Saved, problems: list[str]) -> CheckpointEntry | None:
    recorded = record.checkpoint_folders(folder) if record is not None else ()
    homes = [folder]
    # Checkpoints in other folders name the folder that the run had when it saved them.
    if record is not None and record.folder not in ("", folder) and find_record(record.folder).record is None:
        homes.append(record.folder)
    candidates = []
    for place in dict.fromkeys((f"{folder}/{CHECKPOINTS}", *recorded)):
        entries = saved.in_folder(place, problems)
        if place != folder and not place.startswith(f"{folder}/"):
            entries = [entry for entry in entries if _is_of(saved.facts_of(entry.path, problems), homes)]
        if place in recorded and not entries:
            problems.append(f"{place} no longer contains a complete checkpoint of this run.")
        candidates += entries
    return max(candidates, key=lambda entry: entry.order, default=None)


def _is_of(facts: _Facts, homes: Sequence[str]) -> bool:
    inside = [str(fsspec.core.url_to_fs(home)[1]) for home in homes]
    return any(same_path(folder, home) for folder in facts.folders for home in inside)


def _written_at(run: ListedRun) -> float | None:
    """Return the time of the run's end, or of the last write, or None if the file system has no times."""
    if run.record is not None and run.record.ended is not None:
        return datetime.fromisoformat(run.record.ended).timestamp()
    filesystem, inside = fsspec.core.url_to_fs(run.folder)
    moments = []
    for entry in filesystem.ls(inside, detail=True):
        moment = entry.get("mtime", entry.get("LastModified", entry.get("created")))
        if entry.get("type") == "file" and moment is not None:
            moments.append(moment.timestamp() if isinstance(moment, datetime) else float(moment))
    return max(moments, default=None)


def _sorting(runs: list[ListedRun], sort: str) -> tuple[str, str]:
    """Return the metric of --sort and the mode of the comparison; ValueError if no run has it."""
    known = dict.fromkeys(name for run in runs for name in (*run.monitors, *run.history.series))
    metric, _, mode = sort.rpartition(":")
    if sort in known or (mode not in ("min", "max") and metric not in known):
        metric, mode = sort, ""
    elif mode not in ("min", "max"):
        raise ValueError(f"--sort {sort}: {mode!r} is not a mode; write {metric}:min or {metric}:max.")
    if metric not in known and runs:
        names = f"{', '.join(known) or 'none'}.{did_you_mean(metric, known)}"
        raise ValueError(f"--sort {sort}: no run has this metric; choose from {names}")
    # The mode of a ModelCheckpoint in any run comes before the direction of the name.
    modes = [run.monitors[metric] for run in runs if metric in run.monitors]
    return metric, mode or (modes[0] if modes else direction_of(metric) or "max")


def _sorted(runs: list[ListedRun], metric: str, mode: str) -> list[ListedRun]:
    for run in runs:
        run.modes[metric] = mode

    def order(run: ListedRun) -> tuple[bool, float]:
        best = run.best_of(metric)
        return best is None, 0.0 if best is None else best.value if best.mode == "min" else -best.value

    return sorted(runs, key=order)


def _as_data(run: ListedRun, sort: str | None) -> dict[str, Any]:
    record, entry = run.record, run.checkpoint
    return {
        "run": run.name,
        "folder": run.folder,
        "state": run.state.word,
        "remark": run.state.remark or None,
        **{name: getattr(record, name, None) for name in ("call", "began", "resumed", "ended")},
        "age_seconds": None if run.written_at is None else round(max(0.0, time.time() - run.written_at), 1),
        "epoch": run.epoch,
        "step": run.step,
        "best": {name: best._asdict() for name, best in _shown_best(run, sort).items()},
        "checkpoint": None if entry is None else {"path": entry.path, "step": int(entry.step), "epoch": entry.epoch},
        "problems": run.problems,
    }


def _shown_best(run: ListedRun, sort: str | None) -> dict[str, Best]:
    first = run.best_of(sort) if sort is not None else None
    return {**({sort: first} if sort is not None and first is not None else {}), **run.best}


def _table(runs: Sequence[ListedRun], directory: str, sort: str | None, width: int | None) -> list[str]:
    """Return the lines of the list. A narrow terminal gets fewer details, then fewer columns."""
    for detail in range(MOST_DETAIL, -1, -1):
        rows = [HEADS, *(_cells(run, directory, sort, detail) for run in runs)]
        lines = lay_out(rows, width, dropped=() if detail else (6, 2, 5))
        if width is None or max(map(len, lines)) <= width:
            break
    return lines


def _cells(run: ListedRun, directory: str, sort: str | None, detail: int) -> list[str]:
    """Return the row of a run. Detail 3 shows all, 2 no steps of best values, 1 one value, 0 no remarks."""
    remark = f" ({run.state.remark})" if run.state.remark and detail else ""
    best = []
    for name, value in _shown_best(run, sort).items():
        at = f" at logged step {value.step}" if value.step is not None and detail == MOST_DETAIL else ""
        best.append(f"{name} {value.value:.5g}{at}")
    best = best if detail > 1 or len(best) < 2 else [best[0], "..."]
    path = run.checkpoint.path if run.checkpoint is not None else NO_VALUE
    root = absolute(directory).rstrip("/")
    path = posixpath.relpath(path, root) if path.startswith(f"{root}/") else path
    age = NO_VALUE if run.written_at is None else _age(time.time() - run.written_at)
    position = (NO_VALUE if number is None else str(number) for number in (run.epoch, run.step))
    cells = (run.name, f"{run.state.word}{remark}", *position, ", ".join(best) or NO_VALUE, path, age)
    return [printable(cell) for cell in cells]


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"
