"""`trainwright test`: trains a small net under every strategy here, on 1 and 2 processes, and compares the weights."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor

from trainwright.devices import hardware
from trainwright.devices.hardware import describe_devices
from trainwright.distributed.environment import Environment
from trainwright.launch.cli import Parser
from trainwright.launch.config import find_config, set_variables_of
from trainwright.strategies import SPAWNING, STRATEGIES, VARIANTS
from trainwright.strategies.memory_plan import ALONE
from trainwright.tools.choices import choose
from trainwright.tools.machine import LISTED_STRATEGIES, why_missing

LARGEST_DIFFERENCE = 1e-5
"""The largest difference of a weight: ten times what a different order of sums causes, a thousandth of what an error causes."""
SHOWN_LINES = 12
INTERRUPTED = 130


class Outcome(NamedTuple):
    """How one run ended."""

    works: bool
    text: str
    output: str = ""
    """The last lines of a run that failed."""


def trials_command(arguments: Sequence[str], _: Any) -> int:
    """Run `trainwright test`; return 0, or 1 if something that is installed fails."""
    parser = Parser(
        prog="trainwright test",
        description="Trains a small net under every strategy that is installed, on 1 and 2 processes, and compares the weights "
        "with those of one process on the same batches.",
    )
    parser.add_argument("--cpu", action="store_true", help="compute on the CPU even if there is a GPU")
    parser.add_argument(
        "--strategies", metavar="NAME,NAME", help=f"of {', '.join(LISTED_STRATEGIES)} (default: all), or others"
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", default="120", help="the longest time of one run (default: 120)"
    )
    parser.add_argument("--config-file", metavar="PATH", help="the config whose variables are set, as launch does")
    options = parser.parse_args(arguments)
    try:
        known = [*LISTED_STRATEGIES, *STRATEGIES, *(name for name in VARIANTS if name not in SPAWNING)]
        strategies = choose(options.strategies, known, LISTED_STRATEGIES, "--strategies")
        if not options.timeout.isdigit() or int(options.timeout) < 1:
            raise ValueError(f"--timeout {options.timeout}: expected an integer of at least 1, in seconds.")
        config = find_config(options.config_file)
        variables = set_variables_of(config)
        if (job := Environment.detect(variables)).launched_by != "single":
            raise ValueError(
                f"the environment is that of rank {job.rank} of a job of {job.world_size} process(es), started by "
                f"{job.launched_by}, and the test starts other jobs; run it in a shell outside of that job."
            )
    except ValueError as error:
        parser.error(str(error))
    on_cpu = options.cpu or ("cpu" in config.values and config.values["cpu"].text.lower() == "true")
    with tempfile.TemporaryDirectory(prefix="trainwright-test-") as folder:
        try:
            return Trials(folder, variables, on_cpu, int(options.timeout)).run(strategies)
        except KeyboardInterrupt:
            print("\nThe test was interrupted.")
            return INTERRUPTED


class Trials:
    """The runs of one test, each in new processes, so that a crash of one leaves the others."""

    def __init__(self, folder: str, variables: dict[str, str], on_cpu: bool, timeout_seconds: int) -> None:
        self.folder = Path(folder)
        self.variables = variables
        self.on_cpu = on_cpu
        self.timeout_seconds = timeout_seconds
        self.expected: dict[str, Tensor] = {}
        """The weights of one process without a strategy."""

    def run(self, strategies: Sequence[str]) -> int:
        """Print a row for each strategy as it is done, then what failed and what is missing; return the exit code."""
        has_gpu = hardware.accelerator_type() is not None and not self.on_cpu
        print(f"This machine has {describe_devices()}; the test computes on the {'GPU' if has_gpu else 'CPU'}.")
        print(f"{'strategy':<20}{'1 process':<26}{'2 processes':<26}")
        failed: list[tuple[str, str]] = []
        missing: list[str] = []
        alone = self._trial(ALONE, 1)
        if not alone.works:
            print(f"{ALONE:<20}{alone.text}\n\nOne process does not train, so nothing can be compared:\n{alone.output}")
            return 1
        for name in strategies:
            if reason := why_missing(name):
                missing.append(f"{name}: {reason}")
                print(f"{name:<20}not installed", flush=True)
                continue
            print(f"{name:<20}", end="", flush=True)
            for count in (1, 2):
                if count == 2 and (name == ALONE or (has_gpu and hardware.count() < 2)):
                    print("-" if name == ALONE else "needs 2 GPUs", end="", flush=True)
                    continue
                outcome = alone if name == ALONE else self._trial(name, count)
                print(f"{outcome.text:<26}", end="", flush=True)
                if not outcome.works:
                    failed.append((f"{name} on {count} process(es): {outcome.text}", outcome.output))
            print(flush=True)
        for title, output in failed:
            print(f"\n{title}\n{output}")
        for text in missing:
            print(f"\n{text}", end="")
        works = "Everything that is installed works." if not failed else f"{len(failed)} run(s) failed."
        print(f"\n{works}")
        return 1 if failed else 0

    def _trial(self, strategy: str, num_processes: int) -> Outcome:
        """Train under a strategy in new processes, and compare its weights with the expected ones."""
        out = self.folder / f"{strategy}-{num_processes}.safetensors"
        of_trial = ["trainwright.tools.trial", strategy, str(out), *(["--cpu"] if self.on_cpu else [])]
        command = [sys.executable, "-m", *of_trial, "--alone"]
        if num_processes > 1:
            launch = ["launch", "--config-file", os.devnull, "--devices", str(num_processes), "--strategy", strategy]
            command = [
                sys.executable,
                "-m",
                "trainwright",
                *launch,
                *(["--cpu"] if self.on_cpu else []),
                "-m",
                *of_trial,
            ]
        start = time.monotonic()
        with open(self.folder / "output", "w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                command, env=self.variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                code = process.wait(self.timeout_seconds)
            except subprocess.TimeoutExpired:
                return Outcome(False, f"no end in {self.timeout_seconds} s", _last_lines(output))
            finally:
                process.kill()  # its workers end with it
                process.wait()
            if code != 0 or not out.exists():
                return Outcome(False, f"failed (exit code {code})", _last_lines(output))
        weights = load_file(out)
        self.expected = self.expected or weights
        difference = max(float((weights[name] - each).abs().max()) for name, each in self.expected.items())
        if not difference <= LARGEST_DIFFERENCE:  # also if it is NaN
            return Outcome(
                False, f"differs by {difference:.1e}", "Its weights are not those of one process on the same batches."
            )
        return Outcome(True, f"works, {difference:.0e} ({time.monotonic() - start:.0f} s)")


def _last_lines(output: Any) -> str:
    output.seek(0)
    return "\n".join(f"  {line}" for line in output.read().splitlines()[-SHOWN_LINES:])
