"""The cost of a step under each strategy against the same strategy written by hand, and against Lightning.

A transformer of 20 M parameters, 2 x 32 tokens per rank and step, fused AdamW, two ranks of one thread on the CPU. Each loop is
a separate job, started before anything is timed. The loops of one strategy then take turns of a few steps, in an order that is
reversed each round, so that noise hits all of them. The ratio is the median of the ratios within the rounds. `cpu` is that
ratio for the CPU time of a rank, which other work on the machine disturbs less.

`peak` is the peak memory of a rank, from before its model is made to the third step. On the CPU it comes from another job,
whose allocator returns freed memory: otherwise glibc keeps a few hundred MiB, more in one run than in the next. `optimizer` is
the optimizer state on a rank, and `budget` the most that it should be.

    python benchmarks/strategies.py [--rounds 11] [--steps 4] [--strategies ddp,fsdp] [--loops by_hand,trainwright]
    python benchmarks/strategies.py --small --rounds 1      # a tiny model, to try it
    python benchmarks/strategies.py --gpu                   # one GPU: ddp, fsdp and DeepSpeed's stage 2 in low precision
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STRATEGIES = ("ddp", "ddp_sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
ON_GPU = ("ddp", "fsdp", "deepspeed_stage_2")
LOOPS = ("by_hand", "trainwright", "lightning")
PACKAGES = {"ddp_sharded": "fairscale", "deepspeed": "deepspeed", "lightning": "lightning"}
"""What a strategy or a loop needs, by the beginning of its name."""
WARMUP_STEPS = 3
PATIENCE_SECONDS = 180.0
"""A loop that needs longer for its start or for a turn is taken to hang."""
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
"""What makes glibc give back each larger piece of memory as soon as it is freed, at a cost of time."""
MIB = 2**20
ROOT = Path(__file__).resolve().parents[1]


class Failed(Exception):
    """A loop ended early; the text is what it printed."""


@dataclass
class Loop:
    """A job that runs one loop, and what its ranks reported."""

    name: str
    process: subprocess.Popen[bytes]
    printed: Any
    ranks: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of a step, in each turn."""
    cpu_seconds: list[float] = field(default_factory=list)
    """The same of a rank's CPU time."""
    memory: int = 0
    optimizer: int = 0
    losses: list[float] = field(default_factory=list)

    def wait_for_start(self, server: socket.socket, num_ranks: int) -> None:
        server.settimeout(1.0)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.ranks) < num_ranks:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise self.failure() from None
                continue
            connection.settimeout(PATIENCE_SECONDS)
            self.ranks.append(connection.makefile("rw"))
        self.ranks.sort(key=lambda rank: int(self.read(rank)["rank"]))

    def read(self, rank: Any) -> dict[str, Any]:
        try:
            line = rank.readline()
        except OSError:
            line = ""
        if not line:
            raise self.failure()
        told: dict[str, Any] = json.loads(line)
        return told

    def tell_all(self) -> list[dict[str, Any]]:
        """Let the ranks continue, and return what they report next."""
        for rank in self.ranks:
            rank.write("go\n")
            rank.flush()
        return [self.read(rank) for rank in self.ranks]

    def take_turn(self, steps: int) -> None:
        turn = self.tell_all()
        self.seconds.append(max(told["seconds"] for told in turn) / steps)
        self.cpu_seconds.append(statistics.mean(told["cpu_seconds"] for told in turn) / steps)

    def finish(self) -> None:
        results = self.tell_all()
        self.memory = max(told["memory"] for told in results)
        self.optimizer = max(told["optimizer"] for told in results)
        self.losses = [told["loss"] for told in results]
        if self.process.wait(timeout=PATIENCE_SECONDS) != 0:
            raise self.failure()

    def stop(self) -> None:
        self.process.kill()  # its workers end with it
        self.process.wait()

    def failure(self) -> Failed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)  # it may still be printing why
        self.stop()
        self.printed.seek(0)
        return Failed(f"{self.name} ended early:\n{self.printed.read().decode(errors='replace')[-6000:]}")


def start(
    name: str,
    strategy: str,
    precision: str,
    options: argparse.Namespace,
    rounds: int,
    variables: dict[str, str],
) -> Loop:
    """Start the job of one loop, and return it once it has warmed up."""
    num_ranks = 1 if options.gpu else 2
    size = "gpu" if options.gpu else "small" if options.small else "cpu"
    settings = {"loop": name, "strategy": strategy, "precision": precision, "size": size}
    settings |= {"warmup": WARMUP_STEPS, "rounds": rounds, "steps": options.steps}
    command = [sys.executable, "-m", "trainwright.launch.processes", f'{{"num_processes": {num_ranks}}}']
    command += [sys.executable, str(Path(__file__).with_name("strategy_loops.py"))]
    command += [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    variables = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        **variables,
    }
    if not options.gpu:
        variables["DS_ACCELERATOR"] = "cpu"
    printed = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the job
    with socket.create_server(("127.0.0.1", 0)) as server:
        command += ["--port", str(server.getsockname()[1])]
        process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=printed, stderr=subprocess.STDOUT)
        loop = Loop(name, process, printed)
        loop.wait_for_start(server, num_ranks)
    loop.tell_all()
    return loop


def measure(strategy: str, precision: str, names: list[str], options: argparse.Namespace) -> list[Loop]:
    """Start the loops of one strategy, let them take turns, and return them with the measurements."""
    loops: list[Loop] = []
    try:
        for name in names:
            loops.append(start(name, strategy, precision, options, options.rounds, {}))
        for turn in range(options.rounds):
            for loop in loops if turn % 2 == 0 else reversed(loops):
                loop.take_turn(options.steps)
        for loop in loops:
            loop.finish()
    finally:
        for loop in loops:
            loop.stop()
    check_losses(strategy, precision, loops)
    for loop in [] if options.gpu or options.small else loops:
        alone = start(loop.name, strategy, precision, options, 0, GIVES_BACK)
        alone.finish()
        loop.memory = alone.memory
    return loops


def check_losses(strategy: str, precision: str, loops: list[Loop]) -> None:
    """Fail if the loops did not do the same work: in 32 bits they end at the same losses."""
    first = loops[0]
    for loop in loops[1:] if precision == "32-true" else []:
        if any(abs(a - b) > 1e-3 * abs(a) for a, b in zip(first.losses, loop.losses, strict=True)):
            raise Failed(f"{strategy}: {first.name} ended at the losses {first.losses}, {loop.name} at {loop.losses}")


def budget(strategy: str, whole: int, largest: int, num_ranks: int) -> float:
    """Return the most bytes of optimizer state that a rank should have, given those of the model and of its largest tensor."""
    if strategy == "ddp" or num_ranks == 1:
        return whole
    share = 1 / num_ranks
    if strategy == "ddp_sharded":
        share = max(share, largest / whole)
    return (share + 0.05) * whole


def left_out(strategy: str, name: str, options: argparse.Namespace) -> str | None:
    """Return why a loop is skipped; None if it runs."""
    for subject in (strategy, name):
        for beginning, package in PACKAGES.items():
            if subject.startswith(beginning) and importlib.util.find_spec(package) is None:
                return f"{package} is not installed"
    if name == "lightning" and strategy == "ddp_sharded":
        return "it has no such strategy any more"
    if name == "lightning" and strategy.startswith("deepspeed") and not options.gpu:
        return "its DeepSpeedStrategy refuses every accelerator but CUDA"
    return None


def report(strategy: str, loops: list[Loop], limit: float) -> None:
    base = next((loop for loop in loops if loop.name == "by_hand"), None)
    for loop in loops:
        told = " " * 32
        if base is not None:
            ratios = [mine / reference for mine, reference in zip(loop.seconds, base.seconds, strict=True)]
            cpu = [mine / reference for mine, reference in zip(loop.cpu_seconds, base.cpu_seconds, strict=True)]
            told = (
                f"{statistics.median(ratios):7.3f} {min(ratios):7.3f} {max(ratios):8.3f} {statistics.median(cpu):7.3f}"
            )
        print(
            f"{strategy:24s} {loop.name:12s} {1e3 * statistics.median(loop.seconds):10.1f} {told} {loop.memory / MIB:9.1f} "
            f"{loop.optimizer / MIB:10.2f} {limit / MIB:8.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="turns of each loop; the median counts")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--strategies", default="", help="names, comma-separated")
    parser.add_argument("--loops", default=",".join(LOOPS), help="names, comma-separated")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try it")
    parser.add_argument("--gpu", action="store_true", help="one GPU, in 16-mixed and bf16-mixed")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 1:
        parser.error(f"--rounds {options.rounds} --steps {options.steps}: both are 1 or more")
    accepted = ON_GPU if options.gpu else STRATEGIES
    wanted = options.strategies.split(",") if options.strategies else accepted
    names = options.loops.split(",")
    for chosen, known in ((wanted, accepted), (names, LOOPS)):
        if unknown := [each for each in chosen if each not in known]:
            parser.error(f"{unknown[0]!r} is unknown here; choose from {', '.join(known)}")
    run(wanted, names, options)


def run(wanted: Any, names: list[str], options: argparse.Namespace) -> None:
    from strategy_loops import SIZES, Net

    parameters = list(Net(SIZES["small" if options.small else "cpu"]).parameters())
    moments = [8 * each.numel() for each in parameters]  # two of float32 for each element
    num_ranks = 1 if options.gpu else 2
    print(
        f"{sum(moments) / 8e6:.1f} M parameters, {num_ranks} rank(s), {options.rounds} rounds of {options.steps} steps; the "
        f"machine's load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n\n"
        f"{'strategy':24s} {'loop':12s} {'ms a step':>10s} {'ratio':>7s} {'lowest':>7s} {'highest':>8s} {'cpu':>7s} "
        f"{'peak MiB':>9s} {'optimizer':>10s} {'budget':>8s}"
    )
    notes = []
    for precision in ("16-mixed", "bf16-mixed") if options.gpu else ("32-true",):
        for strategy in wanted:
            why = {name: left_out(strategy, name, options) for name in names}
            notes += [f"{strategy}: {name} left out, {reason}" for name, reason in why.items() if reason]
            if strategy == "fsdp" and why.get("lightning", "") is None and not options.gpu:
                notes.append("fsdp: lightning by its ModelParallelStrategy, since its FSDPStrategy takes CUDA only")
            if present := [name for name in names if why[name] is None]:
                title = f"{strategy} {precision}" if options.gpu else strategy
                loops = measure(strategy, precision, present, options)
                report(title, loops, budget(strategy, sum(moments), max(moments), num_ranks))
    print("", *dict.fromkeys(notes), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except Failed as error:
        sys.exit(str(error))
