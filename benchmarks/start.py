"""How long a process takes whose run is a few batches: the imports, the start and the end of a run.

Each loop of benchmarks/overhead.py runs in a process of its own, in interleaved rounds; the ratios to the hand-written loop are
medians of the ratios within each round.

    python benchmarks/start.py [--rounds 5] [--only hand_written,trainwright_trainer]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

LOOPS = (
    "hand_written",
    "trainwright_trainer",
    "trainwright_accelerator",
    "ignite_engine",
    "lightning_fabric",
    "hf_accelerate",
    "lightning_trainer",
    "hf_trainer",
)
PROGRAM = """
import sys
from overhead import {loop}
try:
    {loop}(10)
except ImportError as error:
    sys.exit(f"{loop}: left out, {{error.name}} is not installed")
"""


def measure(loop: str) -> tuple[float, float, float]:
    """Run a loop in a process; return its seconds, those of its CPU, and the most memory that it had, in MiB."""
    began = time.perf_counter()
    folder = Path(__file__).parent
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM.format(loop=loop)], cwd=folder, env=variables)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ChildProcessError
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds; the median counts")
    parser.add_argument("--only", default=",".join(LOOPS), help="names of loops of overhead.py, comma-separated")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if not {LOOPS[0]} <= set(wanted) <= set(LOOPS):
        parser.error(f"--only takes {LOOPS[0]}, for the ratios, and others of {', '.join(LOOPS[1:])}")
    figures: dict[str, list[tuple[float, float, float]]] = {}
    for loop in wanted:
        try:
            measure(loop)  # Python compiles what it imports first
        except ChildProcessError:
            continue
        figures[loop] = []
    for _ in range(options.rounds):
        for loop, rows in figures.items():
            rows.append(measure(loop))
    print(f"\n{'loop':25s} {'s':>6s} {'ratio':>6s} {'CPU s':>6s} {'ratio':>6s} {'MiB':>5s}   ({options.rounds} rounds)")
    for loop, rows in figures.items():
        seconds, cpu, memory = (statistics.median(each) for each in zip(*rows, strict=True))
        ratios = [
            statistics.median(row[which] / base[which] for row, base in zip(rows, figures[LOOPS[0]], strict=True))
            for which in (0, 1)
        ]
        print(f"{loop:25s} {seconds:6.2f} {ratios[0]:6.2f} {cpu:6.2f} {ratios[1]:6.2f} {memory:5.0f}")


if __name__ == "__main__":
    main()
