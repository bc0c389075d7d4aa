"""How long launchers take: for starts, failures, lost and new nodes, and signals (docs/launching.md).

Every case is a real job on nodes that are network namespaces of this machine (tests/machines.py), which needs root or
user namespaces. The messages of the launchers follow the table. The time of a step is that at which its computation begins.

    python benchmarks/launching.py [--rounds 3] [--rows 3,5] [--tree ANOTHER_CHECKOUT]
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from machines import ADDRESSES, Network, machines
from started import Started, processes_of, python

TRAIN, SAMPLES = str(Path(__file__).resolve().with_name("launching_job.py")), 240
LIMIT = 120.0  # seconds after which a wait ends
ADDRESS, PORT = ADDRESSES[0], "29500"
# In these commands {node} is the number of the node.
ONE = python("-m", "trainwright", "launch", "--devices", "2")
MEET = python("-m", "trainwright", "launch", "--main-address", ADDRESS, "--main-port", PORT)
TWO = [*MEET, "--num-nodes", "2", "--node-rank", "{node}"]
TWO_AGAIN = [*TWO, "--max-restarts", "1"]
RANGE = [*MEET, "--nodes", "1:3", "--max-restarts", "3"]
RANGE_SOON = [*RANGE, "--rendezvous-seconds", "20"]
SCRIPT = ["env", "NODE_RANK={node}", f"MASTER_ADDR={ADDRESS}", f"MASTER_PORT={PORT}", *python()]
TORCHRUN = python("-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "{node}")
TORCHRUN += ["--master-addr", ADDRESS, "--master-port", PORT]
STEP, TOGETHER = "{} s to a step", "{} s to a step of all nodes"
GONE, GONE_2 = "{} s to the end of all processes", "{} s to the end of those on node 2"
Figures = dict[str, float]  # numbers by the words around them; infinite if the limit has passed
Act = Callable[["Job"], object]


class Job:
    """The launchers of a job, at most one for each node, and the steps that its ranks have recorded."""

    def __init__(self, network: Network, tree: Path) -> None:
        self.network, self.folder, self.tree = network, network.folder, tree
        self.launchers: dict[int, Started] = {}

    def start(self, node: int, command: list[str], epochs: int = 8, settings: str = "{}") -> None:
        words = [*(word.format(node=node) for word in command), TRAIN, str(SAMPLES), str(epochs), settings]
        words = ["sh", "-c", f'exec "$@" > ../output-{node} 2>&1', "sh", *words]
        self.launchers[node] = self.network.start(node, words, PYTHONPATH=str(self.tree))

    def steps(self) -> list[dict[str, Any]]:
        texts = [path.read_text() for path in sorted(self.folder.glob("steps-*"), key=os.path.getmtime)]
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def first(self, condition: Callable[[dict[str, Any]], bool]) -> float:
        """Return the time of the first step that meets the condition, or infinity."""
        return min((step["time"] for step in self.steps() if condition(step)), default=math.inf)

    def signal_rank_1(self, number: int) -> None:
        os.kill([step["pid"] for step in self.steps() if step["rank"] == 1][-1], number)

    def signal(self, number: int, *nodes: int) -> None:
        for node in nodes:
            self.launchers[node].process.send_signal(number)

    def happened(self, words: str, event: float) -> float:
        """Return the time at which it happened after this event, or infinity."""
        if words == STEP:
            return self.first(lambda step: step["start"] > event)
        if words == TOGETHER:  # a job on one node has two processes
            return self.first(lambda step: step["world"] == max(2, len(self.launchers)) and step["step"] > 20)
        launchers = [self.launchers[2]] if words == GONE_2 else self.launchers.values()
        is_over = all(each.process.poll() is not None and not processes_of(each.tag) for each in launchers)
        return time.time() if is_over else math.inf

    def watch(self, event: float, *awaited: str, limit: float = LIMIT) -> Figures:
        """Wait until all of these have happened. Return their seconds after the event."""
        found = dict.fromkeys(awaited, math.inf)
        end = time.time() + limit
        while math.inf in found.values() and time.time() < end:
            time.sleep(0.1)
            found = {words: min(seconds, self.happened(words, event) - event) for words, seconds in found.items()}
        return found

    def samples(self) -> str:
        """Return how many samples of all epochs were used once, in the steps that no later start has undone."""
        used: Counter[tuple[int, float]] = Counter()
        begins = {step["start"]: step["step"] for step in sorted(self.steps(), key=lambda step: -step["step"])}
        first = {(step["start"], step["step"]): step["samples"] for step in self.steps() if step["rank"] == 0}
        for step in self.steps():
            # A rank for which no samples are left computes with those of rank 0, which do not count.
            is_dummy = step["rank"] > 0 and step["samples"] == first.get((step["start"], step["step"]))
            if not is_dummy and all(step["step"] < begin for start, begin in begins.items() if start > step["start"]):
                used.update((step["epoch"], sample) for sample in step["samples"])
        return f"{list(used.values()).count(1)} of {SAMPLES * (1 + max(step['epoch'] for step in self.steps()))}"


def start(nodes: int, command: list[str], settings: str, job: Job) -> Figures:
    for node in range(nodes):
        time.sleep(node)
        event = time.time()
        job.start(node, command, settings=settings)
    if (seconds := job.watch(event, STEP))[STEP] == math.inf:
        return seconds
    launcher = psutil.Process(job.launchers[0].process.pid)
    used = sum(launcher.cpu_times()[:2])
    time.sleep(5)
    more = sum(launcher.cpu_times()[:2]) - used
    peak = int(Path(f"/proc/{launcher.pid}/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return seconds | {"launcher {} MiB": peak, "its CPU {} s": used, "and {} s in 5 s": more}


def after(nodes: int, command: list[str], act: Act, awaited: str, job: Job, epochs: int = 8) -> Figures:
    """Do something to a job that has trained for 20 steps, and wait for what it causes."""
    for node in range(nodes):
        job.start(node, command, epochs)
    if math.inf in job.watch(time.time(), TOGETHER).values():
        return {"no start in {} s": math.inf}
    event = time.time()
    act(job)
    return job.watch(event, *awaited.split("; "))


def come_back(job: Job) -> None:
    job.signal(SIGKILL, 1)
    time.sleep(5)
    job.start(1, TWO_AGAIN)


def add(job: Job) -> None:
    job.start(2, RANGE_SOON, 40)
    if math.inf in job.watch(time.time(), TOGETHER, limit=20.0).values():
        job.signal_rank_1(SIGKILL)  # since it joins at a restart


def wait(node: int, is_silent: bool, job: Job) -> Figures:
    """Stop a launcher that waits for the other of two nodes."""
    if is_silent:
        job.network.start(
            0, python("-c", f"import socket, time; s = socket.create_server(('', {PORT})); time.sleep(999)")
        )
    job.start(node, TWO)
    time.sleep(10)
    event = time.time()
    job.signal(SIGTERM, node)
    return job.watch(event, GONE)


FAILURES: dict[str, Act] = {
    "raises": lambda job: (job.folder / "raise").touch(),
    "is killed": lambda job: job.signal_rank_1(SIGKILL),
    "calls sys.exit(3)": lambda job: (job.folder / "exit").touch(),
}
CASES: list[tuple[int, str, Callable[[Job], Figures]]] = [
    (1, "one node: python train.py", partial(start, 1, python(), '{"devices": 2}')),
    (1, "one node: the command", partial(start, 1, ONE, "{}")),
    (2, "two nodes: the command with --num-nodes", partial(start, 2, TWO, "{}")),
    (2, "two nodes: the command with --nodes", partial(start, 2, [*MEET, "--nodes", "2"], "{}")),
    (2, "two nodes: the script", partial(start, 2, SCRIPT, '{"num_nodes": 2, "devices": 1}')),
    (2, "two nodes: torchrun", partial(start, 2, TORCHRUN, "{}")),
    *((3, f"one node: rank 1 {how}", partial(after, 1, ONE, act, GONE)) for how, act in FAILURES.items()),
    *((4, f"two nodes: rank 1 {how}", partial(after, 2, TWO, act, GONE)) for how, act in FAILURES.items()),
    (4, "the same, with 1 restart", partial(after, 2, TWO_AGAIN, FAILURES["calls sys.exit(3)"], GONE)),
    (5, "1:3: rank 1 is killed", partial(after, 3, RANGE, FAILURES["is killed"], STEP)),
    (6, "1:3: the launcher of node 1 is killed", partial(after, 3, RANGE, lambda job: job.signal(SIGKILL, 1), STEP)),
    (6, "two nodes: node 1 is killed, and started 5 s later", partial(after, 2, TWO_AGAIN, come_back, STEP)),
    (7, "1:3: node 2 is cut", partial(after, 3, RANGE, lambda job: job.network.cut(2), f"{STEP}; {GONE_2}")),
    (8, "1:3: the launcher of node 0 is killed", partial(after, 3, RANGE, lambda job: job.signal(SIGKILL, 0), GONE)),
    (9, "1:3: SIGTERM to node 1", partial(after, 3, RANGE, lambda job: job.signal(SIGTERM, 1), STEP)),
    (10, "1:3: SIGTERM to all", partial(after, 3, RANGE, lambda job: job.signal(SIGTERM, 0, 1, 2), GONE)),
    (10, "1:3: SIGTERM to node 0", partial(after, 3, RANGE, lambda job: job.signal(SIGTERM, 0), GONE)),
    (10, "1:3: SIGTERM to rank 1", partial(after, 3, RANGE, lambda job: job.signal_rank_1(SIGTERM), GONE)),
    (11, "1:3: node 2 comes; a failure 20 s later, if needed", partial(after, 2, RANGE_SOON, add, TOGETHER, epochs=40)),
    (12, "SIGTERM to node 0, which waits", partial(wait, 0, False)),
    (12, "SIGTERM to node 1, which waits", partial(wait, 1, False)),
    (12, "the same; node 0 is a program that does not answer", partial(wait, 1, True)),
]


def measure(run: Callable[[Job], Figures], tree: Path) -> tuple[Figures, str, str, list[str]]:
    """Run one job. Return its figures, the nodes' exit codes, the samples that were used once, and the messages."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with folder as name, redirect_stdout(io.StringIO()), machines(Path(name), nodes=3) as network:
        job = Job(network, tree)
        figures = run(job)
        job.watch(time.time(), GONE, limit=5.0 if math.inf in figures.values() else LIMIT)
        launchers = [launcher for _, launcher in sorted(job.launchers.items())]
        codes = ["runs" if launcher.process.poll() is None else launcher.process.returncode for launcher in launchers]
        left = sum(len(processes_of(launcher.tag)) for launcher in launchers)
        messages = []
        for path in sorted(job.folder.glob("output-*")):
            lines = dict.fromkeys(path.read_text().replace(name, ".").splitlines())
            messages += [f"    node {path.name[-1]}: {line}" for line in lines if line.startswith("trainwright: ")]
        samples = job.samples() if 0 in codes else ""
    return figures, ", ".join(map(str, codes)) + f" ({left} processes left)" * (left > 0), samples, messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="the median counts")
    parser.add_argument("--rows", default="", help="numbers of rows, comma-separated; all if empty")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="the checkout to measure")
    options = parser.parse_args()
    print("| row | case | medians | exit codes of the nodes | samples used once | load |\n|---|---|---|---|---|---|")
    messages: list[str] = []
    for row, title, run in (case for case in CASES if not options.rows or str(case[0]) in options.rows.split(",")):
        rounds = [measure(run, options.tree.resolve()) for _ in range(options.rounds)]
        all_figures, codes, samples, said = zip(*rounds, strict=True)
        cells = []
        for words in dict.fromkeys(words for figures in all_figures for words in figures):
            median = statistics.median(figures.get(words, math.inf) for figures in all_figures)
            cells.append(words.format(f"more than {LIMIT:g}" if median == math.inf else f"{median:.1f}"))
        outcome = [" or ".join(dict.fromkeys(texts)) for texts in (codes, samples)]
        line = [str(row), title, "; ".join(cells), *outcome, f"{os.getloadavg()[0]:.1f}"]
        print("|", " | ".join(line), "|", flush=True)
        messages += [f"{row}. {title}", *said[0]]
    print("", *messages, sep="\n")


if __name__ == "__main__":
    main()
