"""`trainwright plot`: draws the curves of one or several runs as a page."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import fsspec

from trainwright.history import CURVES_NAME
from trainwright.launch.cli import Parser
from trainwright.launch.config import printable
from trainwright.loggers.files import TABLE_NAME, write_file
from trainwright.loggers.run_files import EVENTS, find_runs, listing, read_history
from trainwright.loggers.run_record import RECORD_NAME
from trainwright.paths import absolute
from trainwright.plots import AXES, check_page, draw, panels_of


def plot_command(arguments: Sequence[str], _: Any) -> int:
    """Run `trainwright plot` and return its exit code."""
    parser = Parser(
        prog="trainwright plot",
        description="Draws the curves of runs: losses together, other metrics, learning rates and throughput. A RUN is a "
        "folder that CSVLogger or TensorBoardLogger wrote; trainwright runs lists them.",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="the folder of a run, such as trainwright_logs/version_0")
    page = f"the page, which ends in .html; default: {CURVES_NAME} in the run, or here for several"
    add("--out", metavar="FILE", help=page)
    add("--metrics", action="append", metavar="A,B", help="the metrics to draw; default: all")
    add("--x", choices=AXES, default="step", help="the x axis; default: step")
    options = parser.parse_args(arguments)
    try:
        runs = dict.fromkeys(absolute(run).rstrip("/") or "/" for run in options.runs)
        for run in runs:
            check_run(run)
        histories = [read_history(run) for run in runs]
        drawn = [history for history in histories if history.series] or histories
        out = options.out or (CURVES_NAME if len(histories) > 1 else f"{drawn[0].folder}/{CURVES_NAME}")
        check_page(out)
        if os.path.isdir(out):
            raise ValueError(f"--out {out} is a folder; pass the name of a file.")
        texts = ",".join(options.metrics or ())
        metrics = [name.strip() for name in texts.split(",")] if texts else None
        data = draw(drawn, metrics, options.x)
        write_file(absolute(out), data)
        panels = panels_of(drawn, metrics, options.x)
    except (ValueError, ImportError, OSError) as error:
        parser.error(printable(str(error)))
    for history in histories:
        skipped = [] if history in drawn else [f"{history.folder} has no rows yet, so it is skipped."]
        for problem in (*history.problems, *skipped):
            print(f"trainwright plot: {printable(problem)}", file=sys.stderr)
    of = f"{len(drawn)} runs" if len(drawn) > 1 else "1 run"
    print(f"{printable(out)}: {len(panels)} panels of {of}, {sum(len(panel.curves) for panel in panels)} curves")
    return 0


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
