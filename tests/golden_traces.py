"""Records golden traces of a checkout's behavior, and compares two records.

    python tests/golden_traces.py record OUT --tree CHECKOUT --seeds 0:400 --kinds resume cuts --jobs 2
    python tests/golden_traces.py compare A B --ignore 'state.position'

A record has a file per kind, with a JSON line per case (fuzzed/traced.py). The cases are those of this checkout, and
the package is the one in `--tree`. For the kinds without seeds and for the compatibility cases, `--seeds` selects by number.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).resolve().parent
KINDS = ("resume", "cuts", "ranks", "raw", "state", "layers", "peer", "cases")
Case = tuple[int, str, Any]
"""Its number, the name of its kind, and its configuration."""


def record(options: argparse.Namespace) -> int:
    """Record the traces of the cases, in the order of their numbers, and return 0."""
    os.environ |= {"PYTHONHASHSEED": "0", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "PYTHONSAFEPATH": "1"}
    os.environ |= {"TRACED_KINDS": " ".join(options.kinds), "TRACED_TREE": str(options.tree.resolve())}
    sys.path[:0] = [os.environ["TRACED_TREE"], *(str(TESTS / each) for each in ("", "../benchmarks", "compatibility"))]
    import driver
    import fuzzed.traced
    from fuzz.__main__ import configurations, kind_of
    from fuzz.job import Jobs

    options.out.mkdir(parents=True)
    sizes, (start, stop) = {"cases": (1,)}, options.seeds
    listed: list[Case] = []
    for name in options.kinds:
        if name == "cases":
            configs = sorted(driver.cases())[start:stop]
        else:
            sizes[name] = kind_of(name).PROCESSES
            configs = [config for _, config in configurations(kind_of(name), start, stop - start)]
        listed += [(number, name, config) for number, config in enumerate(configs, start)]
    cases: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in sorted(listed, key=lambda case: case[0]):
        cases.put(case)
    ends, seconds = time.monotonic() + options.minutes * 60, {name: list[float]() for name in options.kinds}

    def work() -> None:
        kind: Any = SimpleNamespace(__name__="fuzzed.traced", LIMIT=fuzzed.traced.LIMIT)
        jobs = Jobs(kind)
        try:
            while time.monotonic() < ends and not cases.empty():
                number, name, config = cases.get()
                began, kind.PROCESSES = time.monotonic(), sizes[name]
                line = json.dumps({"case": number, "trace": trace_of(jobs, name, number, config)})
                with (options.out / f"{name}.jsonl").open("a") as file:
                    file.write(line + "\n")
                seconds[name].append(time.monotonic() - began)
        finally:
            jobs.close()

    with ThreadPoolExecutor(options.jobs) as pool:
        for done in [pool.submit(work) for _ in range(options.jobs)]:
            done.result()
    print(*(f"{name}: {len(each)} cases, {sum(each):.0f} s" for name, each in seconds.items()), sep="\n")
    return 0


def trace_of(jobs: Any, name: str, number: int, config: Any) -> dict[str, Any]:
    """Run a case, and return its outcome and the lines of its processes. Every second case of a fuzz kind has a Witness."""
    with tempfile.TemporaryDirectory() as parts:
        asked = {"traced": name, "case": config, "parts": parts, "witness": name != "cases" and number % 2 == 0}
        outcome = jobs.run(asked | ({"processes": config["processes"]} if name == "ranks" else {}))
        lines = {
            each.name: list(map(json.loads, each.read_text().splitlines())) for each in sorted(Path(parts).iterdir())
        }
    for text in outcome.differences:
        print(f"{name} {number}: {text}", flush=True)
    return {"differs": sorted(outcome.aspects), "is_refused": outcome.refused is not None, "processes": lines}


def first_difference(one: Any, other: Any, ignore: re.Pattern[str] | None, field: str = "") -> str:
    """Return the first field in which two traces differ, and its values, or "" if there is none."""
    if one == other or (ignore is not None and ignore.search(field)):
        return ""
    if isinstance(one, list) and isinstance(other, list):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return f"{field.removeprefix('.')}: {one!r:.300} and {other!r:.300}"
    pairs = (
        (f"{field}.{key}", one.get(key), other.get(key)) for key in [*one, *(key for key in other if key not in one)]
    )
    return next((found for field, *pair in pairs if (found := first_difference(*pair, ignore, field))), "")


def read(path: Path) -> dict[int, Any]:
    """Return the traces in a file of a record by the numbers of their cases, or none if there is no file."""
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return {line["case"]: line["trace"] for line in lines}


def compare(options: argparse.Namespace) -> int:
    """Print the first difference of every kind. Return 1 if there is any, or if the records have no case in common."""
    compared = different = 0
    for name in KINDS:
        one, other = (read(folder / f"{name}.jsonl") for folder in (options.one, options.other))
        if not one and not other:
            continue
        common = sorted(one.keys() & other.keys())
        found = {case: first_difference(one[case], other[case], options.ignore) for case in common}
        found = {case: text for case, text in found.items() if text}
        print(
            f"{name}: {len(found)} of {len(common)} cases differ, {len(one.keys() ^ other.keys())} are in one record only"
        )
        for case in list(found)[:1]:
            print(f"  {name} {case}: {found[case]}\n  all: {', '.join(map(str, found))}")
        compared, different = compared + len(common), different + len(found)
    return int(different > 0 or compared == 0)


def span(text: str) -> tuple[int, int]:
    """Parse START:STOP."""
    start, stop = map(int, text.split(":"))
    if not 0 <= start < stop:
        raise ValueError(text)
    return start, stop


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    recording, comparing = commands.add_parser("record"), commands.add_parser("compare")
    recording.add_argument("out", type=Path, help="a new folder, outside the tree")
    recording.add_argument("--tree", type=Path, default=TESTS.parent, help="the checkout whose package is traced")
    recording.add_argument("--seeds", type=span, default=(0, 400), metavar="START:STOP")
    recording.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    recording.add_argument("--jobs", type=int, default=1, help="cases at a time")
    recording.add_argument("--minutes", type=float, default=float("inf"), help="start no case after this time")
    recording.set_defaults(run=record)
    comparing.add_argument("one", type=Path)
    comparing.add_argument("other", type=Path)
    comparing.add_argument("--ignore", type=re.compile, help="a regular expression of fields, as 'state.position'")
    comparing.set_defaults(run=compare)
    options = parser.parse_args(arguments)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
