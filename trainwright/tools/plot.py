"""`trainwright plot`: draws the curves of one or several runs as a page or an image."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from trainwright.launch.cli import Parser
from trainwright.launch.config import printable
from trainwright.loggers.files import write_file
from trainwright.loggers.history import CURVES_NAME, History
from trainwright.loggers.run_files import read_history
from trainwright.paths import absolute
from trainwright.plots import AXES, checked_format, draw, panels_of


def plot_command(arguments: Sequence[str], _: Any) -> int:
    """Run `trainwright plot` and return its exit code."""
    parser = Parser(
        prog="trainwright plot",
        description="Draws the curves of runs: losses together, other metrics, learning rates and throughput. A RUN is a "
        "folder that CSVLogger or TensorBoardLogger wrote; trainwright runs lists them.",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="the folder of a run, such as trainwright_logs/version_0")
    add(
        "--out",
        metavar="FILE",
        help=f"a page (.html) or an image (.png, with matplotlib); default: {CURVES_NAME} in the run, or here for several",
    )
    add("--metrics", action="append", metavar="A,B", help="the metrics to draw; default: all")
    add(
        "--x",
        choices=AXES,
        default="step",
        help="the x axis; default: step. time needs event files of a TensorBoardLogger",
    )
    options = parser.parse_args(arguments)
    try:
        histories = [read_history(each, with_times=options.x == "time") for each in _distinct(options.runs)]
        drawn = [each for each in histories if each.series] or histories
        out = options.out or (CURVES_NAME if len(histories) > 1 else f"{drawn[0].folder}/{CURVES_NAME}")
        form = checked_format(out)
        if os.path.isdir(out):
            raise ValueError(f"--out {out} is a folder; give the name of a file.")
        metrics = _named(options.metrics, drawn) if options.metrics else None
        data = draw(drawn, form, metrics, options.x)
        write_file(absolute(out), data)
        panels = panels_of(drawn, metrics, options.x)
    except (ValueError, ImportError, OSError) as error:
        parser.error(printable(str(error)))
    for each in histories:
        for problem in (
            *each.problems,
            *(() if each in drawn else (f"{each.folder} has no rows yet, and is left out.",)),
        ):
            print(f"trainwright plot: {printable(problem)}", file=sys.stderr)
    of = f"{len(drawn)} runs" if len(drawn) > 1 else "1 run"
    print(f"{printable(out)}: {len(panels)} panels of {of}, {sum(len(each.curves) for each in panels)} curves")
    return 0


def _distinct(runs: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(absolute(each).rstrip("/") or "/" for each in runs))


def _named(given: Sequence[str], histories: Sequence[History]) -> list[str]:
    """Return the names of metrics; a name that holds a comma is one if a run has it."""
    known = {name for each in histories for name in each.series}
    names: list[str] = []
    for each in given:
        names += [each] if each in known else [part for name in each.split(",") if (part := name.strip())]
    return names
