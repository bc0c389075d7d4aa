"""`trainwright test`: trains a small net under every strategy, on 1 and 2 processes, and compares the weights.

`python -m trainwright.tools.trials STRATEGY OUT` is one such training. Rank 0 writes the weights to a safetensors file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Accelerator, gather_module
from trainwright.devices import hardware
from trainwright.devices.hardware import describe_devices
from trainwright.distributed.environment import Environment
from trainwright.launch.cli import Parser
from trainwright.launch.config import find_config
from trainwright.strategies import SPAWNING, STRATEGIES, VARIANTS
from trainwright.strategies.memory_plan import ALONE
from trainwright.tools.choices import LISTED_STRATEGIES, choose, why_missing

LARGEST_DIFFERENCE = 1e-5
"""The largest allowed difference of a weight. Another order of sums causes 1e-6, an error about 1e-2."""
SAMPLES, BATCH, WIDTH = 48, 8, 16
"""BATCH counts the samples of all processes together."""
SHOWN_LINES = 12
INTERRUPTED = 130


class TrialResult(NamedTuple):
    """The end of one training."""

    works: bool
    text: str
    output: str = ""
    """The last lines of a failed training."""


def trials_command(arguments: Sequence[str], _: Any) -> int:
    """Run `trainwright test`, and return 0, or 1 if an installed strategy fails."""
    parser = Parser(
        prog="trainwright test",
        description="Trains a small net under every installed strategy, on 1 and 2 processes. Compares its weights with the "
        "weights of one process that trains on the same batches.",
    )
    parser.add_argument("--cpu", action="store_true", help="compute on the CPU even if there is a GPU")
    names = f"of {', '.join(LISTED_STRATEGIES)} (default: all), or others"
    parser.add_argument("--strategies", metavar="NAME,NAME", help=names)
    parser.add_argument("--timeout", metavar="SECONDS", default="120", help="the longest training (default: 120)")
    parser.add_argument("--config-file", metavar="PATH", help="set the variables of this config, as launch does")
    options = parser.parse_args(arguments)
    try:
        known = [*LISTED_STRATEGIES, *STRATEGIES, *(name for name in VARIANTS if name not in SPAWNING)]
        strategies = choose(options.strategies, known, LISTED_STRATEGIES, "--strategies")
        if not options.timeout.isdigit() or int(options.timeout) < 1:
            raise ValueError(f"--timeout {options.timeout}: expected an integer of at least 1, in seconds.")
        config = find_config(options.config_file)
        variables = config.set_variables()
        if (job := Environment.detect(variables)).launched_by != "single":
            raise ValueError(
                f"the environment describes rank {job.rank} of a job of {job.world_size} process(es), started by "
                f"{job.launched_by}. The test starts other jobs, so run it in a shell outside of that job."
            )
    except ValueError as error:
        parser.error(str(error))
    on_cpu = options.cpu or config.values.get("cpu", "").lower() == "true"
    with tempfile.TemporaryDirectory(prefix="trainwright-test-") as folder:
        try:
            return Trials(folder, variables, on_cpu, int(options.timeout)).run(strategies)
        except KeyboardInterrupt:
            print("\nThe test was interrupted.")
            return INTERRUPTED


class Trials:
    """The trainings of one test, in new processes, so that a crash does not end the test."""

    def __init__(self, folder: str, variables: dict[str, str], on_cpu: bool, timeout_seconds: int) -> None:
        self.folder = Path(folder)
        self.variables = variables
        self.on_cpu = on_cpu
        self.has_gpu = hardware.accelerator_type() is not None and not on_cpu
        self.timeout_seconds = timeout_seconds
        self.expected: dict[str, Tensor] = {}
        """The weights of one process without a strategy."""

    def run(self, strategies: Sequence[str]) -> int:
        """Print the table, failures and missing packages, and return the exit code."""
        print(f"This machine has {describe_devices()}; the test computes on the {'GPU' if self.has_gpu else 'CPU'}.")
        print(f"{'strategy':<20}{'1 process':<26}{'2 processes':<26}")
        alone = self._trial(ALONE, 1)
        if not alone.works:
            print(f"{ALONE:<20}{alone.text}\n\nOne process does not train, so nothing can be compared:\n{alone.output}")
            return 1
        missing = {name: reason for name in strategies if (reason := why_missing(name))}
        failed: list[str] = []
        for name in strategies:
            print(f"{name:<20}", end="", flush=True)
            if name in missing:
                print("not installed", end="")
            for count in (1, 2) if name not in missing else ():
                result = alone if (name, count) == (ALONE, 1) else self._row_entry(name, count)
                print(f"{result.text:<26}", end="", flush=True)
                failed += [] if result.works else [f"\n{name} on {count} process(es): {result.text}\n{result.output}"]
            print(flush=True)
        works = f"{len(failed)} run(s) failed." if failed else "Everything that is installed works."
        print(*failed, sep="\n", end="\n" if failed else "")
        print("".join(f"\n{name}: {reason}" for name, reason in missing.items()) + f"\n{works}")
        return 1 if failed else 0

    def _row_entry(self, name: str, count: int) -> TrialResult:
        """Train under a strategy, or return why this number of processes is skipped."""
        if name == ALONE:
            return TrialResult(True, "-")
        if count == 2 and self.has_gpu and hardware.count() < 2:
            return TrialResult(True, "needs 2 GPUs")
        return self._trial(name, count)

    def _trial(self, strategy: str, num_processes: int) -> TrialResult:
        """Train under a strategy in new processes, and compare the weights with the expected ones."""
        out = self.folder / f"{strategy}-{num_processes}.safetensors"
        on_cpu = ["--cpu"] if self.on_cpu else []
        of_trial = ["-m", "trainwright.tools.trials", strategy, str(out), *on_cpu]
        command = [*of_trial, "--alone"]
        if num_processes > 1:
            launch = ["launch", "--config-file", os.devnull, "--devices", str(num_processes), "--strategy", strategy]
            command = ["-m", "trainwright", *launch, *on_cpu, *of_trial]
        start = time.monotonic()
        with open(self.folder / "output", "w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                [sys.executable, *command], env=self.variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                code = process.wait(self.timeout_seconds)
            except subprocess.TimeoutExpired:
                return TrialResult(False, f"no end in {self.timeout_seconds} s", _last_lines(output))
            finally:
                process.kill()  # its workers end with it
                process.wait()
            if code != 0 or not out.exists():
                return TrialResult(False, f"failed (exit code {code})", _last_lines(output))
        weights = load_file(out)
        self.expected = self.expected or weights
        difference = max(float((weights[name] - weight).abs().max()) for name, weight in self.expected.items())
        if not difference <= LARGEST_DIFFERENCE:  # also if it is NaN
            text = "Its weights differ from the weights of one process on the same batches."
            return TrialResult(False, f"differs by {difference:.1e}", text)
        return TrialResult(True, f"works, {difference:.0e} ({time.monotonic() - start:.0f} s)")


def _last_lines(output: Any) -> str:
    output.seek(0)
    return "\n".join(f"  {line}" for line in output.read().splitlines()[-SHOWN_LINES:])


def train() -> None:
    """Train the small net in this process, and write its weights on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("out")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--alone", action="store_true", help="this process is the whole job")
    options = parser.parse_args()
    devices = 1 if options.alone else "auto"
    loop = Accelerator(strategy=options.strategy, cpu=options.cpu, devices=devices, precision="32-true")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    inputs = torch.randn(SAMPLES, WIDTH)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=BATCH // loop.num_processes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prepared, optimizer, loader = loop.prepare(model, optimizer, loader)
    for batch, targets in loader:
        loss = nn.functional.cross_entropy(prepared(batch), targets)
        loop.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    whole = gather_module(loop.unwrap_model(prepared))
    if whole is not None:
        save_file({name: tensor.contiguous() for name, tensor in whole.state_dict().items()}, options.out)
    loop.engine.close()


if __name__ == "__main__":
    train()
