"""The memory of each rank under every strategy, measured, and the largest network in a fixed budget.

Four families of networks (benchmarks/memory_models.py) train for two steps of Adam in float32 on real gloo ranks. Each rank
counts the bytes of its parameters, gradients, optimizer state and saved activations; the rank that holds most is shown, beside
the package's estimate of the first three. The peak is that of the process, which also has buffers of the communication that
no tensor shows. Then the widest network of the family is searched whose bytes, activations included, fit in the budget.

    python benchmarks/sharded_memory.py [--ranks 2,4] [--families text,speech] [--strategies ddp,fsdp] [--budget 128]
    python benchmarks/sharded_memory.py --small --ranks 2          # narrow networks, to try it

The table, the records and a picture are written to benchmarks/out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from memory_models import FAMILIES
from memory_picture import PARTS, Record, draw, of_ddp, total

ON_MESHES = ("fsdp hybrid", "fsdp tensor")
"""Two replicas of groups of shards, and two data ranks of the text transformer in tensor groups, for four ranks or more."""
STRATEGIES = (
    "ddp",
    "ddp_sharded",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_2 small",
    "fsdp",
    "deepspeed_stage_3",
    "deepspeed_stage_3 small",
)
"""Names of strategies; `small` is with small buffers (memory_job.py has their sizes)."""
PACKAGES = {"ddp_sharded": "fairscale", "deepspeed": "deepspeed"}
"""What a strategy needs, by the beginning of its name."""
BUDGET = 128
"""MiB of a rank."""
SMALL_WIDTH, SMALL_BUDGET = 64, 16
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
"""What makes glibc give back each larger piece of memory as soon as it is freed, at a cost of time."""
PATIENCE_SECONDS = 3600.0
MIB = 2**20
ROOT = Path(__file__).resolve().parents[1]
HEAD = (
    "network | ranks | strategy | parameters | gathered | gradients | optimizer | these | estimate | activations | peak"
)
LARGEST_ROOT = Path(__file__).resolve().parents[1]


def run_job(family: str, ranks: int, options: argparse.Namespace, out: Path) -> None:
    """Measure one family on a number of ranks; its records are added to the file."""
    settings = {"family": family, "strategies": ",".join(options.strategies), "ranks": ranks, "out": out}
    settings |= {"width": options.width, "budget": options.budget}
    command = [sys.executable, "-m", "trainwright.launch.processes", f'{{"num_processes": {ranks}}}']
    command += [sys.executable, str(Path(__file__).with_name("memory_job.py"))]
    command += [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **GIVES_BACK}
    variables["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{family} on {ranks} ranks ended with {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}")


def tables(records: list[Record]) -> Iterator[str]:
    """Yield the lines of both tables, in Markdown; sizes are MiB of the rank that holds most."""
    ranks = list(dict.fromkeys(each["ranks"] for each in records))
    families = list(dict.fromkeys(each["family"] for each in records))
    strategies = list(dict.fromkeys(each["strategy"] for each in records))
    found = {(each["kind"], each["family"], each["strategy"], each["ranks"]): each for each in records}
    parts = "parameters + gathered + gradients + optimizer"
    yield from head(
        "network", "strategy", *(f"{each} ranks: {parts} | estimate | activations | peak" for each in ranks)
    )
    for family in families:
        for strategy in strategies:
            chosen = [found["table", family, strategy, each] for each in ranks]
            title = f"{FAMILIES[family].title}, {chosen[0]['count'] / 1e6:.1f} M"
            yield row(title, f"`{strategy}`", *map(held_text, chosen))
    if largest := [each for each in records if each["kind"] == "largest"]:
        budget = largest[0]["budget"] // MIB
        yield f"\nThe largest networks in {budget} MiB: million parameters, and how many times those of `ddp`.\n"
        columns = [(family, number) for family in families for number in ranks]
        yield from head("strategy", *(f"{FAMILIES[family].title}, {number} ranks" for family, number in columns))
        for strategy in strategies:
            chosen = [found.get(("largest", family, strategy, number)) for family, number in columns]
            yield row(f"`{strategy}`", *(largest_text(each, largest) for each in chosen))


def held_text(record: Record) -> str:
    without = total(record) - record["activations"]
    parts = " + ".join(f"{record[part] / MIB:.1f}" for part in PARTS[:4])
    # The estimate is that of the buffers' own sizes.
    estimate = "" if record["strategy"].endswith("small") else f"{record['estimate'] / MIB:.1f}"
    return (
        f"{parts} = {without / MIB:.1f} | {estimate} | {record['activations'] / MIB:.1f} | {record['peak'] / MIB:.1f}"
    )


def largest_text(record: Record | None, largest: list[Record]) -> str:
    if record is None:
        return "none"
    base = of_ddp(record, largest)
    return f"{record['count'] / 1e6:.1f}" + ("" if base is None else f" ({record['count'] / base:.2f})")


def head(*names: str) -> list[str]:
    line = row(*names)
    return [line, f"|{'---|' * (line.count('|') - 1)}"]


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def choose(given: str, known: Iterable[str], flag: str, parser: argparse.ArgumentParser) -> list[str]:
    chosen = given.split(",") if given else list(known)
    if unknown := [each for each in chosen if each not in known]:
        parser.error(f"{flag} {unknown[0]!r} is unknown; choose from {', '.join(known)}")
    return chosen


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of processes, comma-separated")
    parser.add_argument("--families", default="", help=f"of {', '.join(FAMILIES)}, comma-separated")
    parser.add_argument("--strategies", default="", help=f"of {', '.join(STRATEGIES)}, comma-separated")
    parser.add_argument("--budget", type=int, help="MiB of a rank for the largest network; 0 leaves that out")
    parser.add_argument("--small", action="store_true", help="narrow networks, to try it")
    parser.add_argument("--width", type=int, default=0, help="another width of the networks in the table")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "out", help="the folder for what it writes")
    options = parser.parse_args()
    options.families = choose(options.families, FAMILIES, "--families", parser)
    options.strategies = choose(
        options.strategies or ",".join(STRATEGIES), [*STRATEGIES, *ON_MESHES], "--strategies", parser
    )
    if not all(each.isdigit() and int(each) > 1 for each in options.ranks.split(",")):
        parser.error(f"--ranks {options.ranks}: numbers of processes from 2 on, such as 2,4")
    options.ranks = [int(each) for each in options.ranks.split(",")]
    options.width = options.width or (SMALL_WIDTH if options.small else 0)
    on_meshes = [name for name in ON_MESHES if name in options.strategies]
    if on_meshes and any(each < 4 or each % 2 for each in options.ranks):
        parser.error(f"{on_meshes[0]} has a mesh of two rows of ranks: pass --ranks 4, or omit it from --strategies")
    if options.budget is None:
        options.budget = SMALL_BUDGET if options.small else BUDGET
    if options.budget < 0:
        parser.error(f"--budget {options.budget}: MiB, or 0")
    missing = {
        package: [name for name in options.strategies if name.startswith(beginning)]
        for beginning, package in PACKAGES.items()
        if importlib.util.find_spec(package) is None
    }
    for package, names in missing.items():
        if names:
            print(f"left out, because {package} is not installed: {', '.join(names)}", file=sys.stderr)
            options.strategies = [name for name in options.strategies if name not in names]
    return options


def main() -> None:
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out / "sharded_memory.jsonl"
    out.write_text("")
    for ranks in options.ranks:
        for family in options.families:
            start = time.perf_counter()
            run_job(family, ranks, options, out)
            print(f"{family} on {ranks} ranks: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    text = "\n".join(tables(records))
    out.with_suffix(".md").write_text(text + "\n")
    print(text)
    if importlib.util.find_spec("matplotlib") is not None:
        draw(out.with_suffix(".png"), records)
        print(f"\npicture: {out.with_suffix('.png')}")


if __name__ == "__main__":
    main()
