"""The cost of training on this machine's GPU, against a hand-written loop and every other installed framework.

A case is a model with its batches and precision, eager or compiled; a checkpoint save; or the start of a process. Each
implementation of a case runs separately. Those of one case start together, warm up, and then take turns of about a second,
in an order that is reversed each round, so that noise hits all of them. The ratio is the median of the ratios within the
rounds. All train the same weights on the same batches, and their losses are compared.

The table (table.md, table.csv) and the picture are written after each process, so an interrupted run keeps its results.
With --minutes every case is visited once, the most important first, before any is visited again, and no visit starts that would
not fit.

    python benchmarks/gpu.py --minutes 9                        # on one GPU
    python benchmarks/gpu.py --device cpu --small               # the same code on a CPU, in two minutes
    python benchmarks/gpu.py --cases 'distilbert-12-*,mlp' --implementations by_hand,trainwright --rounds 5
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gpu_cases import LABELS, PACKAGES, Case, all_cases
from gpu_job import JobFailed, Place, describe
from gpu_picture import draw
from gpu_records import Record, Records
from gpu_table import write
from gpu_visit import Visit

ROOT = Path(__file__).resolve().parents[1]
SMALL_MINUTES = 2.0
MOST_VISITS = 3
SHOWN = ("table.md", "table.csv", "ratios.png", "ratios.svg")
SAFETY_SECONDS = 3.0
"""What is kept back of the time, for the last table."""


class Run:
    """A run of the benchmark: what it measures, on what, and for how long.

    Args:
        options: of the command line.
        cases: what to measure, the most important first.
        names: the implementations to run.
        environment: what `describe` found.
        began: when the command began, on the monotonic clock.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        cases: list[Case],
        names: list[str],
        environment: dict[str, Any],
        began: float,
    ) -> None:
        self.options, self.cases = options, cases
        missing = {
            each: PACKAGES[each] for each in names if PACKAGES.get(each) not in (None, *environment["installed"])
        }
        self.names = [each for each in names if each not in missing]
        self.missing = sorted(set(missing.values()))
        self.folder = Path(options.out)
        self.environment = environment
        if not options.resume:
            put_aside(self.folder)
        logs = self.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.place = Place(
            device=environment["device"],
            is_small=options.small,
            with_transformers=environment["with_transformers"],
            compiler=options.compiler or ("aot_eager" if options.small else "inductor"),
            logs=logs,
            environment=child_environment(environment),
        )
        self.records = Records(self.folder / "records.jsonl", environment, options.resume)
        self.deadline = float("inf") if options.minutes is None else began + 60 * options.minutes - SAFETY_SECONDS
        self.most_visits = options.visits or (1 if options.minutes is None else MOST_VISITS)
        self._lasted: dict[tuple[str, ...], float] = {}
        self._visit: Visit | None = None
        self._upcoming: Visit | None = None

    def run(self) -> None:
        """Visit cases while one fits into the remaining time."""
        try:
            while (visit := self._begun()) is not None:
                began = time.monotonic()
                self._visit = visit
                visit.run(meanwhile=self._start_next)
                self._visit = None
                case, lasted = visit.case, time.monotonic() - began
                self._lasted[case.like] = max(lasted, self._lasted.get(case.like, 0.0))
                left = (
                    f", {max(0.0, self.deadline - time.monotonic()):.0f} s left"
                    if self.options.minutes is not None
                    else ""
                )
                print(f"{case.name}: {lasted:.0f} s{left}", flush=True)
        finally:
            if self._upcoming is not None:
                self._upcoming.end()
            self.write()

    def _begun(self) -> Visit | None:
        """Start the processes of the next visit and return it; None if none fits into the remaining time."""
        left = self.deadline - time.monotonic()
        visit, self._upcoming = self._upcoming, None
        if visit is not None:
            if self._seconds_of(visit.case) <= left and not self.records.has_failed(visit.case):
                return visit
            visit.end()  # the one before it took longer than was thought, or showed that this cannot be measured
        case = self._next_case(left)
        if case is None:
            return None
        visit = self._make_visit(case)
        visit.start()
        return visit

    def _start_next(self) -> Visit | None:
        """Let the processes of the next visit import what they need."""
        assert self._visit is not None
        left = self.deadline - time.monotonic() - self._seconds_of(self._visit.case)
        case = self._next_case(left, present=self._visit.case)
        if case is not None:
            self._upcoming = self._make_visit(case, present=self._visit.case)
            self._upcoming.start()
        return self._upcoming

    def _visits(self, case: Case, present: Case | None) -> int:
        """Return how often a case will have been visited after the current visit."""
        recorded = self.records.visits(case)
        if case is present and self._visit is not None and recorded == self._visit.number:
            return recorded + 1
        return recorded

    def _next_case(self, left: float, present: Case | None = None) -> Case | None:
        waiting = [
            case
            for case in self.cases
            if self._visits(case, present) < self.most_visits and not self.records.has_failed(case)
        ]
        waiting.sort(key=lambda case: self._visits(case, present))  # stable: the most important stays first
        if not waiting or left <= 0:
            return None
        fewest = self._visits(waiting[0], present)
        fitting = [case for case in waiting if self._seconds_of(case) <= left]
        # A second visit of one case is not worth the first of another, unless that would not fit any more.
        firsts = (case for case in fitting if self._visits(case, present) == fewest)
        return next(firsts, next(iter(fitting), None))

    def _seconds_of(self, case: Case) -> float:
        if case.like in self._lasted:
            return 1.15 * self._lasted[case.like]
        guess = case.first_guess_seconds * (0.5 if self.options.small else 1.0)
        whole = 60 * (self.options.minutes or 0.0)
        return min(guess, 0.9 * whole)  # a short time is given to the first case whole

    def _make_visit(self, case: Case, present: Case | None = None) -> Visit:
        names = [each for each in case.implementations if each in self.names]
        if self.options.small and not self.options.implementations and case.name != "mlp":
            names = [
                each for each in names if PACKAGES.get(each, "trainwright") == "trainwright"
            ]  # peers take long to import
        return Visit(
            self.place,
            case,
            names,
            number=self._visits(case, present),
            rounds=self.options.rounds,
            turn_seconds=0.1 if self.options.small else 0.7,
            patience=self.options.patience,
            memory_gib=0.0 if self.options.small else self.environment["memory_gib"],
            deadline=self.deadline,
            finish=self._finish,
            progress=self.write,
        )

    def _finish(self, record: Record) -> None:
        self.records.add(record)
        told = record.reason or f"{1e3 * sorted(record.seconds)[len(record.seconds) // 2]:.3f} ms"
        print(f"  {record.case} {record.implementation}: {told}", flush=True)
        self.write()

    def written(self) -> str:
        """Return where the results are, or an empty text if nothing was measured."""
        if not any(each.seconds for each in self.records.all):
            return ""
        return f"{self.folder}: {', '.join(each for each in SHOWN if (self.folder / each).exists())}"

    def write(self) -> None:
        """Write the table and the picture of the results so far."""
        unfinished = [] if self._visit is None else list(self._visit.records.values())
        rows = self.records.rows(self.cases, (each for each in unfinished if each.seconds))
        not_run = [case.name for case in self.cases if not any(row.case == case.name for row in rows)]
        notes = [f"Not installed: {', '.join(self.missing)}."] if self.missing else []
        notes += [f"Not run: {', '.join(not_run)}."] if not_run else []
        write(self.folder, rows, self.environment, notes)
        draw(self.folder, rows, self.environment)


def put_aside(folder: Path) -> None:
    """Move the results of an earlier run into a separate folder, so that nothing measured is lost."""
    kept = [folder / each for each in ("records.jsonl", *SHOWN, "logs")]
    kept = [each for each in kept if each.exists()]
    if not kept:
        return
    number = next(each for each in itertools.count(1) if not (folder / f"earlier-{each}").exists())
    aside = folder / f"earlier-{number}"
    aside.mkdir()
    for each in kept:
        each.rename(aside / each.name)
    print(f"what {folder} held is in {aside} now; --resume adds to it instead", flush=True)


def child_environment(environment: dict[str, Any]) -> dict[str, str]:
    """Return the environment of the processes, which limits frameworks to one device."""
    path = os.environ.get("PYTHONPATH", "")
    found = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT), "PYTHONUNBUFFERED": "1"}
    if environment.get("device") == "cpu":
        found["OMP_NUM_THREADS"] = "1"
    if environment.get("device") == "cuda" and environment.get("count", 1) > 1:
        found["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return found


def chosen(parser: argparse.ArgumentParser, option: str, given: str, known: Sequence[str]) -> list[str]:
    """Return the known names that match a comma-separated list of patterns; all if it is empty."""
    patterns = [each.strip() for each in given.split(",") if each.strip()] or ["*"]
    for each in patterns:
        if not any(fnmatchcase(name, each) for name in known):
            close = difflib.get_close_matches(each, known, n=1)
            if len([name for name in known if name.startswith(each)]) > 1:
                close = [f"{each}*"]
            meant = f" Did you mean {close[0]!r}?" if close else ""
            parser.error(f"{option} {each!r} is unknown.{meant} Choose from {', '.join(known)}")
    return [name for name in known if any(fnmatchcase(name, each) for each in patterns)]


def parse() -> tuple[argparse.Namespace, list[Case], list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=None, help="how long it may take; without, each case once")
    parser.add_argument(
        "--device", default="", help="cpu, or an accelerator's type; else (or auto) the one that torch sees"
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny models, to try it; --minutes is 2 then, and peers run in mlp alone"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each process; the median counts")
    parser.add_argument(
        "--visits", type=int, default=0, help="visits of each case at most; else 3 with --minutes, 1 without"
    )
    parser.add_argument("--cases", default="", help="names or patterns (distilbert-12-*), comma-separated")
    parser.add_argument("--implementations", default="", help="names or patterns, comma-separated")
    parser.add_argument(
        "--out", default=str(ROOT / "benchmarks" / "out"), help="where table.md, table.csv, ratios.png and logs go"
    )
    parser.add_argument("--resume", action="store_true", help="add to what --out holds; else that is moved aside")
    parser.add_argument("--compiler", default="", help="torch.compile's backend; inductor, aot_eager with --small")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds of silence until a process is given up")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: 1 or more")
    if options.visits < 0:
        parser.error(f"--visits {options.visits}: 0 or more")
    if options.small and options.minutes is None:
        options.minutes = SMALL_MINUTES
    if options.minutes is not None and not 0 < options.minutes < math.inf:
        parser.error(f"--minutes {options.minutes:g}: a number above 0")
    if not 0 < options.patience < math.inf:
        parser.error(f"--patience {options.patience:g}: a number above 0")
    options.device = "" if options.device == "auto" else options.device
    cases = all_cases()
    wanted = chosen(parser, "--cases", options.cases, [case.name for case in cases])
    names = chosen(parser, "--implementations", options.implementations, list(LABELS))
    cases = [case for case in cases if case.name in wanted and set(case.implementations) & set(names)]
    if not cases:
        parser.error(f"--implementations {options.implementations}: no case of --cases {options.cases} has one of them")
    return options, cases, names


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - run as it is, on any interpreter
        sys.exit(
            f"{sys.executable} is Python {sys.version.split()[0]}; Python 3.11 or newer is needed. Name one by PYTHON=."
        )
    began = time.monotonic()
    options, cases, names = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes are ended, and the table written
    try:
        environment = describe(options.device, child_environment({}))
    except KeyboardInterrupt:
        sys.exit("\ncut short before anything was measured")
    except JobFailed as error:
        if "No module named 'torch'" in str(error):
            sys.exit(f"{sys.executable} has no torch; name an interpreter that has one by PYTHON=.")
        sys.exit(str(error).replace("accelerator=", "--device ") if options.device else str(error))
    if not environment["device"]:
        print(
            "torch sees no accelerator here: pass --device cpu --small to try the same code on the CPU "
            '(make bench-gpu ARGS="--device cpu --small").'
        )
        return
    environment["with_transformers"] = "transformers" in environment["installed"]
    environment["small"] = options.small
    try:
        run = Run(options, cases, names, environment, began)
    except ValueError as error:
        sys.exit(str(error))
    try:
        run.run()
    except KeyboardInterrupt:
        told = run.written()
        print(f"\ncut short; what was measured is in {told}" if told else "\ncut short before anything was measured")
        sys.exit(130)
    print((run.folder / "table.md").read_text())
    if not (told := run.written()):
        sys.exit(f"nothing was measured; the table's notes and {run.folder / 'logs'} say why")
    print(f"written to {told}")


if __name__ == "__main__":
    main()
