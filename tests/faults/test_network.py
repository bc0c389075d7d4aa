"""Faults of the network between two machines: a split, loss in one direction, 2 s of delay, and 5 % of loss."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from deadlines import deadline, wait_until
from fault_rows import record_row
from forked import interpret, run_ranks
from machines import ADDRESSES, Network, machines
from small import assert_equal
from started import Started, python

pytestmark = pytest.mark.faults

SCRIPT = """
import os, sys, time
import torch
import trainwright as tw
from small import QUIET, Classifier, make_loader, weights


class Paced(Classifier):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        print(f"step {self.trainer.global_step}.", flush=True)
        time.sleep(0.1)


module = Paced()
trainer = tw.Trainer(max_steps=int(sys.argv[1]), max_epochs=-1, **QUIET)
trainer.fit(module, make_loader(shuffle=True))
if trainer.is_global_zero:
    torch.save(weights(module), "weights.pt")
"""
CABLE = """
# Joins the two ports as the switch did, but each frame is lost with the probability of its direction, or late.
import heapq, itertools, json, random, select, socket, sys, time

ports = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) for _ in range(2)]
for number, port in enumerate(ports):
    port.bind((f"port{number}", 0))
    port.setsockopt(263, 15, 1)  # PACKET_VNET_HDR: frames before their segmentation and checksums, as veth has them
print("joined", flush=True)
losses, delay, frames, numbers = [0, 0], 0, [], itertools.count()
random.seed(1)
while True:
    ready = select.select([*ports, sys.stdin], [], [], max(0, frames[0][0] - time.monotonic()) if frames else None)[0]
    for source in ready:
        if source is sys.stdin:
            losses, delay = json.loads(sys.stdin.readline() or sys.exit())
            print("changed", flush=True)
            continue
        frame, address = source.recvfrom(1 << 17)
        at = ports.index(source)
        if address[2] != socket.PACKET_OUTGOING and random.random() >= losses[at]:
            heapq.heappush(frames, (time.monotonic() + delay, next(numbers), 1 - at, frame))
    while frames and frames[0][0] <= time.monotonic():
        _, _, at, frame = heapq.heappop(frames)
        ports[at].send(frame)
"""


@dataclass
class Case:
    """A job on two machines, and changes of the network between them at its step 8."""

    losses: tuple[float, float]
    """The part of the frames that is lost, of those from node 0 and from node 1."""
    delay: float = 0.0
    steps: int = 100_000
    jobs: list[Started] = field(default_factory=list)
    folder: Path = Path()
    began: float = 0.0
    seconds: float = 0.0
    """From the change of the network to the end of both jobs."""

    def watch(self) -> None:
        for job in self.jobs:
            job.process.wait()
        self.seconds = time.monotonic() - self.began


def lay_cable(network: Network) -> subprocess.Popen[str]:
    for port in ("port0", "port1"):
        network.run(["ip", "link", "set", port, "nomaster"])
    cable = subprocess.Popen(
        [*network.enter, sys.executable, "-c", CABLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert cable.stdout is not None
    assert cable.stdout.readline() == "joined\n"
    return cable


def start(network: Network, case: Case) -> None:
    case.folder = network.folder
    place = ["--num-nodes", "2", "--main-address", ADDRESSES[0], "--main-port", "29531", "--cpu"]
    command = python("-m", "trainwright", "launch", *place)
    case.jobs = [
        network.start(node, [*command, "--node-rank", str(node), "../train.py", str(case.steps)]) for node in (0, 1)
    ]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    """All jobs at the same time, because half a minute passes until a silent machine is lost."""
    found = {
        "a split between two machines": Case((1, 1)),
        "frames from node 1 are lost": Case((0, 1)),
        "frames from node 0 are lost": Case((1, 0)),
        "5 % of all frames are lost": Case((0.05, 0.05), steps=24),
        "2 s of delay": Case((0, 0), delay=1.0, steps=12),  # in each direction
    }
    with ExitStack() as stack:
        cables = []
        for number, case in enumerate(found.values()):
            folder = tmp_path_factory.mktemp(f"network{number}")
            (folder / "train.py").write_text(SCRIPT)
            network = stack.enter_context(machines(folder))
            cables.append(cable := lay_cable(network))
            stack.callback(cable.communicate)
            start(network, case)
        for case, cable in zip(found.values(), cables, strict=True):
            case.jobs[0].wait_for("step 8.")
            assert cable.stdin is not None
            assert cable.stdout is not None
            cable.stdin.write(json.dumps([case.losses, case.delay]) + "\n")
            cable.stdin.flush()
            assert cable.stdout.readline() == "changed\n"
            case.began = time.monotonic()
            threading.Thread(target=case.watch, daemon=True).start()
        yield found


@pytest.mark.parametrize("name", ["5 % of all frames are lost", "2 s of delay"])
def test_job_on_a_bad_network_ends_with_the_weights_of_an_undisturbed_run(
    cases: dict[str, Case], name: str, tmp_path: Path
) -> None:
    case = cases[name]
    for job in case.jobs:
        assert job.wait(240) == 0, job.stderr
        job.check_nothing_left()
    (tmp_path / "train.py").write_text(SCRIPT)
    run_ranks(interpret, (["train.py", str(case.steps)],), 2, tmp_path, 120.0)
    assert_equal(torch.load(case.folder / "node0" / "weights.pt"), torch.load(tmp_path / "weights.pt"))
    record_row(name, case.seconds, "none: the job trains on", "the weights of an undisturbed run")


@pytest.mark.parametrize(
    "name", ["a split between two machines", "frames from node 1 are lost", "frames from node 0 are lost"]
)
def test_split_ends_both_sides_and_names_the_lost_machine(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    for job in case.jobs:
        assert job.wait(180) == 1, job.stderr
    wait_until(lambda: case.seconds)
    for job in case.jobs:
        wait_until(lambda job=job: not job.processes(), 60)
        assert "Traceback" not in job.stderr
    main, other = case.jobs
    assert "its node was lost: the launcher there has ended or cannot" in main.stderr
    assert "rank 1 of 2, on node 1 (" in main.stderr
    assert "trainwright: the launcher of node 0, the main node, has ended or cannot be reached" in other.stderr
    assert case.seconds < deadline(120)
    record_row(name, case.seconds, main.stderr.strip().splitlines()[-1], "exit code 1 on both, no process")
