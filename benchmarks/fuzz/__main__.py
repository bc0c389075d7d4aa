"""Random tests of all kinds, one after the other: `make fuzz SEEDS=200 START=0 KINDS="resume cuts"`.

    resume   a random run, and the same from five of its checkpoints: bitwise the uninterrupted one
    cuts     the same, interrupted by exceptions and signals in random hooks and restarted by the same command
    ranks    one process against two and three, under each strategy: samples, metrics, weights, predictions
    raw      loops through the Accelerator against the same by hand and by the Trainer
    state    each optimizer and scheduler through save and resume, under each strategy and across them (cells, no seeds)
    layers   each kind of layer and loss under each strategy and precision, against one process (cells, no seeds)
    peer     when validations, scheduler steps and stops happen, and which files are kept, against Lightning if installed

A case that differs is shrunk to the smallest configuration that still does, and printed with a script that reproduces it;
`KIND --config '{...}'` runs one configuration, whose other keys have their simplest values. The exit code is 1 if anything
differed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fuzz.job import Jobs, Outcome
from fuzz.kind import Config
from fuzz.script import script_of, shows
from fuzz.shrink import shrink

KINDS = ("resume", "cuts", "ranks", "raw", "state", "layers", "peer")
WANTED = """give an object of the kind's keys, as '{"seed": 3}'"""


def configurations(kind: Any, start: int, seeds: int | None) -> Iterator[tuple[str, Config]]:
    """Yield the name and the configuration of each case: of the seeds, or all cells if none are given."""
    if hasattr(kind, "cells"):
        cells = kind.cells()
        chosen = range(start, len(cells) if seeds is None else min(len(cells), start + seeds))
        yield from ((f"cell {number}", cells[number]) for number in chosen)
        return
    for seed in range(start, start + (20 if seeds is None else seeds)):
        yield f"seed {seed}", kind.draw(random.Random(f"{kind.NAME} {seed}"))


class Hunt:
    """The cases of one kind: run, counted, and those that differ shrunk and printed.

    Args:
        kind: the module.
        shrinking: seconds a failing case may take to shrink.
        failures: the hunt ends after this many failing cases.
    """

    def __init__(self, kind: Any, shrinking: float, failures: int, every: int) -> None:
        self.kind, self.shrinking, self.failures, self.every = kind, shrinking, failures, every
        self.cases = self.refused = self.different = 0
        self.refusals: dict[str, int] = {}
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def run(self, cases: Iterator[tuple[str, Config]], slots: int, seconds: float) -> None:
        """Run the cases, `slots` of them at a time, until all have run or the time is up."""
        deadline = time.monotonic() + seconds

        def worker() -> None:
            jobs = Jobs(self.kind)
            try:
                while time.monotonic() < deadline and self.different < self.failures:
                    with self._lock:
                        case = next(cases, None)
                    if case is None:
                        return
                    self._case(jobs, *case)
            finally:
                jobs.close()

        with ThreadPoolExecutor(slots) as pool:
            for done in [pool.submit(worker) for _ in range(slots)]:
                done.result()

    def _case(self, jobs: Jobs, name: str, config: Config) -> None:
        outcome = jobs.run(config)
        with self._lock:
            self.cases += 1
            if outcome.refused is not None:
                self.refused += 1
                self.refusals[outcome.refused] = self.refusals.get(outcome.refused, 0) + 1
            self.different += bool(outcome.differences)
            if self.cases % self.every == 0:
                print(f"   {self.summary()}", flush=True)
        if outcome.differences:
            self._show(jobs, name, config, outcome)

    def _show(self, jobs: Jobs, name: str, config: Config, outcome: Outcome) -> None:
        latest = outcome

        def still(candidate: Config) -> bool:
            nonlocal latest
            tried = jobs.run(candidate)
            if not tried.aspects & outcome.aspects:
                return False
            latest = tried
            return True

        smallest, tried = shrink(config, self.kind.SIMPLEST, still, self.shrinking)
        script = self._script(smallest, latest)
        with self._lock:
            print(f"== {self.kind.NAME} {name} differs; as drawn: {json.dumps(config)}")
            print(*[f"     {each[:1500]}" for each in outcome.differences[:3]], sep="\n")
            print(f"-- the smallest of {tried} configurations: {json.dumps(smallest)}")
            print(*[f"     {each[:1500]}" for each in latest.differences[:3]], sep="\n")
            print(script, flush=True)

    def _script(self, config: Config, outcome: Outcome) -> str:
        try:
            text = script_of(self.kind, config, outcome.differences)
        except Exception as error:  # a value that the kind does not know; the hunt goes on
            return f"-- no script of it, {type(error).__name__}: {error}; the configuration: {json.dumps(config)}"
        shown, said = shows(text, 3 * self.kind.LIMIT)
        return f"-- a script of it{'' if shown else ', which does not show it: ' + said}\n{text}"

    def summary(self) -> str:
        """Return the counts as one line."""
        seconds = time.monotonic() - self._began
        return (
            f"{self.kind.NAME}: {self.cases} cases, {self.refused} refused, {self.different} different, {seconds:.0f} s"
        )


def kind_of(name: str) -> Any:
    """Return the module of a kind, or None if the name is unknown. A name with a dot is that of a module elsewhere."""
    path = name if "." in name else f"fuzz.{name}"
    if "." not in name and name not in KINDS:
        return None
    try:
        if importlib.util.find_spec(path) is None:
            return None
    except ImportError:  # what stands before the last dot is no package
        return None
    kind = importlib.import_module(path)
    return kind if hasattr(kind, "NAME") and hasattr(kind, "SIMPLEST") else None


def configuration(text: str) -> Config:
    """Parse a configuration. Raises ArgumentTypeError if the text does not hold a JSON object."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error}); {WANTED}") from None
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object; {WANTED}")
    return config


def options_of(arguments: list[str] | None) -> tuple[argparse.Namespace, list[Any]]:
    """Return the options and the kinds' modules; wrong ones end the process with a message and exit code 2."""
    parser = argparse.ArgumentParser(
        "python -m fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="resume, cuts, ...; all of them by default")
    parser.add_argument("--seeds", type=int, help="20 by default; of cells all")
    parser.add_argument("--start", type=int, default=0, help="the first seed or cell")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="the longest that a kind may take")
    parser.add_argument("--config", type=configuration, help="one configuration, as a JSON object; with one KIND")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to shrink a case that differs")
    parser.add_argument("--failures", type=int, default=10, help="a kind ends with so many cases that differ")
    parser.add_argument("--every", type=int, default=50, help="cases between two lines of progress")
    options = parser.parse_args(arguments)
    for name in ("seeds", "jobs", "failures", "every"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: give a whole number from 1 up")
    if options.start < 0:
        parser.error(f"--start {options.start}: give a whole number from 0 up")
    if not options.minutes > 0:  # nan too
        parser.error(f"--minutes {options.minutes:g}: give a number above 0")
    if not options.shrink >= 0:
        parser.error(f"--shrink {options.shrink:g}: give a number from 0 up")
    if options.config is not None and len(options.kinds) != 1:
        parser.error(
            f"--config is of one kind, not of {len(options.kinds) or 'all'}: give one KIND (make: KINDS=resume)"
        )
    kinds = []
    for name in options.kinds or KINDS:
        kind = kind_of(name)
        if kind is None:
            parser.error(f"unknown kind {name!r}; choose from {', '.join(KINDS)}")
        kinds.append(kind)
    for kind in kinds:
        if wrong := _unusable(kind, options):
            parser.error(wrong)
    return options, kinds


def _unusable(kind: Any, options: argparse.Namespace) -> str:
    if options.config is not None:
        unknown = [key for key in options.config if key not in kind.SIMPLEST]
        if unknown:
            return f"--config: {kind.NAME} has no key {unknown[0]!r}; its keys are {', '.join(kind.SIMPLEST)}"
        sizes = sorted({1, *kind.PROCESSES})
        if options.config.get("processes", 1) not in sizes:
            return f"--config: {kind.NAME} runs on {sizes} processes, not on {options.config['processes']!r}"
    elif hasattr(kind, "cells") and options.start >= (cells := len(kind.cells())):
        return f"--start {options.start}: {kind.NAME} has the cells 0 to {cells - 1}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Hunt in each of the given kinds and return the exit code."""
    options, kinds = options_of(arguments)
    lines, failed = [], False
    for kind in kinds:
        missing = kind.available() if hasattr(kind, "available") else ""
        if missing:
            lines.append(f"{kind.NAME}: passed over, {missing}")
            print(lines[-1], flush=True)
            continue
        hunt = Hunt(kind, options.shrink, options.failures, options.every)
        cases = configurations(kind, options.start, options.seeds)
        if options.config is not None:
            simplest = {key: values[0] for key, values in kind.SIMPLEST.items()}
            cases = iter([("configuration", {**simplest, **options.config})])
        hunt.run(cases, options.jobs, options.minutes * 60)
        failed |= bool(hunt.different)
        lines.append(hunt.summary())
        print(
            lines[-1], *[f"     refused {n}: {text[:150]}" for text, n in hunt.refusals.items()], sep="\n", flush=True
        )
    print("", *lines, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
