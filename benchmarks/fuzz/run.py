"""All kinds of random tests, one after the other: `make fuzz`.

    python benchmarks/fuzz/run.py --seeds 200 --start 0 --kinds resume ranks raw state layers

    resume   random runs on one process, resumed from their checkpoints, cut by exceptions and signals and started again
    ranks    one process beside two, under ddp and fsdp: samples, metrics, weights, predictions
    raw      loops of one's own through the Accelerator beside the same by hand, the Trainer, and on two ranks
    state    each optimizer and scheduler through save and resume, under each strategy and between them (no seeds)
    layers   each kind of layer and loss under each strategy and precision, beside one process (no seeds)

A kind prints each seed or cell that differs, with its configuration; the same script with that seed alone runs it again.
The exit code is 1 where anything differed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
TWO_RANKS = ["-m", "trainwright.launch.processes", "--num-processes", "2", "--", sys.executable]
KINDS = ("resume", "ranks", "raw", "state", "layers")


def commands(kind: str, start: int, seeds: int, folder: str) -> list[list[str]]:
    """Return what a kind runs, as arguments of the interpreter."""
    script = str(HERE / f"{kind}.py")
    first, last = str(start), str(start + seeds)
    if kind == "resume":
        return [[script, first, last]]
    if kind == "ranks":
        return [[script, strategy, first, str(seeds)] for strategy in ("ddp", "fsdp")]
    if kind == "raw":
        return [[script, first, last], [script, first, last, "--ranks", "2"]]
    if kind == "state":
        return [[script]]
    return [[script, "alone", folder], [*TWO_RANKS, script, "ranks", folder]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    failed = []
    for kind in options.kinds:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            for arguments in commands(kind, options.start, options.seeds, folder):
                done = subprocess.run(
                    [sys.executable, "-W", "ignore", *arguments],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    check=False,
                )
                if done.returncode:
                    failed.append(kind)
        print(
            f"== {kind}: {'differs' if kind in failed else 'no difference'}, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
