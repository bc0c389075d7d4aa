"""`trainwright runs`: lists the runs in a folder with their state, best values and newest checkpoint."""

from __future__ import annotations

import difflib
import json
import math
import posixpath
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import fsspec
import numpy as np

from trainwright.callbacks.checkpoint_policy import monitor_of
from trainwright.checkpoint.discovery import CheckpointEntry, find_checkpoints, same_path
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.errors import CheckpointError
from trainwright.launch.cli import Parser
from trainwright.launch.variables import printable
from trainwright.loggers.position import CHECKPOINTS
from trainwright.loggers.run_files import find_runs, read_history
from trainwright.loggers.run_record import RunRecord, RunState, read_record
from trainwright.paths import absolute
from trainwright.plots import History

NO_VALUE = "-"
_LEAST = re.compile(
    r"(?:^|[^a-z]|[a-z](?=loss))(?:loss|error|err|mse|rmse|mae|perplexity|ppl|wer|cer)(?:$|[^a-z])", re.IGNORECASE
)
_KNOWN = re.compile(r"(?:loss|acc|accuracy)(?:_epoch)?$", re.IGNORECASE)
"""The metrics whose best values are shown if no ModelCheckpoint says which to watch."""


class Best(NamedTuple):
    """The best value of a metric; the step is None if only a checkpoint knows the value."""

    value: float
    mode: str
    step: int | None


@dataclass
class Run:
    """What is listed of a run."""

    name: str
    """Its folder, seen from the folder that is listed."""
    folder: str
    state: RunState
    record: RunRecord | None
    history: History
    checkpoint: CheckpointEntry | None = None
    monitors: dict[str, str] = field(default_factory=dict)
    """The modes of the metrics that a ModelCheckpoint monitors, by name."""
    scores: dict[str, float] = field(default_factory=dict)
    """The best values that the newest checkpoint knows, by monitored metric."""
    problems: list[str] = field(default_factory=list)
    written_at: float | None = None

    @property
    def step(self) -> int | None:
        known = [self.history.last_step]
        known += [self.record.step] if self.record is not None else []
        known += [int(self.checkpoint.step)] if self.checkpoint is not None else []
        return max((each for each in known if each is not None), default=None)

    @property
    def epoch(self) -> int | None:
        known = [self.history.last_epoch]
        known += [self.checkpoint.epoch] if self.checkpoint is not None else []
        return max((each for each in known if each is not None), default=None)

    def best_of(self, metric: str) -> Best | None:
        """Return the best value of a metric; None if the run has none."""
        mode = self.monitors.get(metric) or ("min" if _LEAST.search(metric) else "max")
        # A logger's prefix comes before the name that the callback knows.
        names = [
            name
            for name in self.history.series
            if name == metric or (metric in self.monitors and name.endswith(f"-{metric}"))
        ]
        series = self.history.series[metric if metric in names else names[0]] if names else None
        if series is not None and (finite := np.flatnonzero(np.isfinite(series.values))).size:
            values = series.values[finite]
            at = finite[values.argmin() if mode == "min" else values.argmax()]
            return Best(float(series.values[at]), mode, int(series.steps[at]))
        return Best(self.scores[metric], mode, None) if metric in self.scores else None

    @property
    def best(self) -> dict[str, Best]:
        """Return the best values of the monitored metrics; without any, of those whose names say which way is better."""
        names = list(self.monitors)
        if not names:
            names = [name for name in self.history.series if _KNOWN.search(name)]
            names = [name for name in names if re.match(r"val", name, re.IGNORECASE)] or names
        return {name: best for name in names if (best := self.best_of(name)) is not None}


def runs_command(arguments: Sequence[str], _: Any) -> int:
    """Run `trainwright runs` and return its exit code."""
    parser = Parser(
        prog="trainwright runs",
        description="Lists the runs in a folder, and in its folders, that CSVLogger or TensorBoardLogger wrote: their state, "
        "the best value of what a ModelCheckpoint monitors, and the newest checkpoint.",
    )
    parser.add_argument("directory", metavar="DIR", help="the folder, such as trainwright_logs")
    parser.add_argument("--sort", metavar="METRIC", help="the runs with the best values of this metric come first")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        runs = list_runs(options.directory)
        if options.sort is not None:
            runs = _sorted(runs, options.sort)
    except (ValueError, OSError) as error:
        parser.error(printable(str(error)))
    if options.json:
        print(json.dumps([_as_data(run, options.sort) for run in runs], indent=2))
        return 0
    if not runs:
        print(
            f"{printable(options.directory)} holds no runs: no folder in it has files of a CSVLogger or a TensorBoardLogger."
        )
        return 0
    print("\n".join(_table(runs, options.directory, options.sort)))
    for run in runs:
        for problem in run.problems:
            print(f"{printable(run.name)}: {printable(problem)}")
    return 0


def list_runs(directory: str) -> list[Run]:
    """Return the runs at and below a folder, by name and number (ValueError if it does not exist)."""
    root = absolute(directory).rstrip("/") or "/"
    filesystem, inside = fsspec.core.url_to_fs(root)
    if not filesystem.isdir(inside):
        what = "is a file" if filesystem.exists(inside) else "does not exist"
        raise ValueError(f"{directory} {what}; give a folder that holds runs, such as trainwright_logs.")
    return [_run(root, folder) for folder in find_runs(root)]


def _run(root: str, folder: str) -> Run:
    record = read_record(folder)
    problems: list[str] = []
    try:
        history = read_history(folder)
        problems += history.problems
    except (ValueError, ImportError, OSError) as error:
        history = History(folder, {})
        problems.append(str(error))
    state = record.state if record is not None else RunState("unknown")
    run = Run(folder[len(root) :].strip("/") or ".", folder, state, record, history, problems=problems)
    run.checkpoint = next(_checkpoints(folder, record, problems), None)
    if run.checkpoint is not None:
        try:
            _take_monitors(run, open_checkpoint(run.checkpoint.path, "off").run_state().get("callbacks"))
        except CheckpointError as error:
            problems.append(str(error))
    run.written_at = _written_at(run)
    return run


def _take_monitors(run: Run, states: Any) -> None:
    """Note what the ModelCheckpoints monitor whose states a checkpoint holds."""
    for key, state in states.items() if isinstance(states, Mapping) else ():
        if monitored := monitor_of(str(key)):
            metric, mode = monitored
            run.monitors[metric] = mode
            score = state.get("best_model_score") if isinstance(state, Mapping) else None
            if isinstance(score, (int, float)) and math.isfinite(score):
                run.scores[metric] = float(score)


def _checkpoints(folder: str, record: RunRecord | None, problems: list[str]) -> Iterator[CheckpointEntry]:
    """Yield the checkpoints of a run, the newest first."""
    own = f"{folder}/{CHECKPOINTS}"
    folders = [own, *(each for each in (record.checkpoints if record is not None else ()) if each != own)]
    found = []
    for each in folders:
        try:
            entries = find_checkpoints(each)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        is_inside = each == own or each.startswith(f"{folder}/")
        found += [(entry, is_inside) for entry in entries]
    for entry, is_inside in sorted(found, key=lambda each: each[0].order, reverse=True):
        if is_inside or _is_of(entry, folder):
            yield entry


def _is_of(entry: CheckpointEntry, folder: str) -> bool:
    """Return whether a checkpoint in another folder, which several runs may use, is of this run."""
    try:
        loggers = open_checkpoint(entry.path, "off").run_state().get("loggers") or []
        folders = [each["state"].get("folder", "") for each in loggers]
    except (CheckpointError, TypeError, KeyError, AttributeError):
        return False
    return any(same_path(each, folder) for each in folders if isinstance(each, str))


def _written_at(run: Run) -> float | None:
    """Return when the run ended, or when something was last written; None if the file system does not say."""
    if run.record is not None and run.record.ended is not None:
        return datetime.fromisoformat(run.record.ended).timestamp()
    filesystem, inside = fsspec.core.url_to_fs(run.folder)
    moments = []
    for entry in filesystem.ls(inside, detail=True):
        moment = entry.get("mtime", entry.get("LastModified", entry.get("created")))
        if entry.get("type") == "file" and moment is not None:
            moments.append(moment.timestamp() if isinstance(moment, datetime) else float(moment))
    return max(moments, default=None)


def _sorted(runs: list[Run], metric: str) -> list[Run]:
    known = dict.fromkeys(name for run in runs for name in (*run.monitors, *run.history.series))
    if metric not in known and runs:
        close = difflib.get_close_matches(metric, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"--sort {metric}: no run has this metric; choose from {', '.join(known) or 'none'}.{hint}")
    # One direction for all runs: that of a ModelCheckpoint of any of them, or else of the name.
    modes = [run.monitors[metric] for run in runs if metric in run.monitors]
    for run in runs:
        run.monitors = {**({metric: modes[0]} if modes else {}), **run.monitors}

    def order(run: Run) -> tuple[bool, float]:
        best = run.best_of(metric)
        return best is None, 0.0 if best is None else best.value if best.mode == "min" else -best.value

    return sorted(runs, key=order)


def _as_data(run: Run, sort: str | None) -> dict[str, Any]:
    record, entry = run.record, run.checkpoint
    return {
        "run": run.name,
        "folder": run.folder,
        "state": run.state.word,
        "remark": run.state.remark or None,
        "call": record.call if record is not None else None,
        "began": record.began if record is not None else None,
        "resumed": record.resumed if record is not None else None,
        "ended": record.ended if record is not None else None,
        "age_seconds": None if run.written_at is None else round(max(0.0, time.time() - run.written_at), 1),
        "epoch": run.epoch,
        "step": run.step,
        "best": {name: best._asdict() for name, best in _shown_best(run, sort).items()},
        "checkpoint": None if entry is None else {"path": entry.path, "step": int(entry.step), "epoch": entry.epoch},
        "problems": run.problems,
    }


def _shown_best(run: Run, sort: str | None) -> dict[str, Best]:
    first = run.best_of(sort) if sort is not None else None
    return {**({sort: first} if sort is not None and first is not None else {}), **run.best}


def _table(runs: Sequence[Run], directory: str, sort: str | None) -> list[str]:
    rows: list[tuple[str, ...]] = [("run", "state", "epoch", "step", "best", "newest checkpoint", "written")]
    for run in runs:
        remark = f" ({run.state.remark})" if run.state.remark else ""
        best = ", ".join(
            f"{name} {each.value:.5g}" + (f" at step {each.step}" if each.step is not None else "")
            for name, each in _shown_best(run, sort).items()
        )
        path = run.checkpoint.path if run.checkpoint is not None else NO_VALUE
        root = absolute(directory).rstrip("/")
        path = posixpath.relpath(path, root) if path.startswith(f"{root}/") else path
        rows.append(
            (
                run.name,
                f"{run.state.word}{remark}",
                *(NO_VALUE if each is None else str(each) for each in (run.epoch, run.step)),
                best or NO_VALUE,
                path,
                NO_VALUE if run.written_at is None else _age(time.time() - run.written_at),
            )
        )
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[at]) for row in shown) for at in range(len(shown[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"
