"""The table of faults: a test in this folder records one row per fault, and `make faults` writes the rows into RESULTS.md."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

_VARIABLE = "TRAINWRIGHT_FAULT_ROWS"
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "RESULTS.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
HEAD = "| fault | noticed after | message (shortened) | left behind |\n|---|---|---|---|\n"


def record_row(fault: str, seconds: float, message: str, left_behind: str) -> None:
    """Record a fault that a test has caused, if a table was requested.

    Args:
        fault: the fault and where it happened, such as "SIGSTOP of rank 1 (ddp, two ranks)".
        seconds: from the fault to the message, or 0 if the test does not measure it.
        message: the line that a user reads.
        left_behind: the exit code, and files or processes that remain.
    """
    if path := os.environ.get(_VARIABLE):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps([fault, seconds, message, left_behind]) + "\n")


def write_table(rows: Path, results: Path = RESULTS) -> None:
    """Replace the table between the two marks of the results by the recorded rows, sorted by fault."""
    lines = sorted({tuple(json.loads(line)[:1]): json.loads(line) for line in rows.read_text().splitlines()}.values())
    cells = [
        [fault, f"{seconds:.1f} s" if seconds else "", re.sub(r"/[\w./=-]*/", "", message.strip())[:160], left]
        for fault, seconds, message, left in lines
    ]
    table = HEAD + "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in cells)
    before, _, rest = results.read_text().partition(BEGIN)
    results.write_text(f"{before}{BEGIN}\n{table}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    write_table(Path(sys.argv[1]))
