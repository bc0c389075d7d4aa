"""Jobs of two machines with one rank per machine."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deadlines import deadline
from forked import interpret, run_ranks
from machines import ADDRESSES, Network, machines
from small import assert_equal
from started import GONE_SECONDS, Started, python

pytestmark = pytest.mark.launch
SCRIPT = """
import json, os, sys, time
import psutil, torch
import trainwright as tw
from small import QUIET, Classifier, make_loader, weights

mode, settings = sys.argv[1], json.loads(sys.argv[2])  # more arguments change nothing
trainer = tw.Trainer(max_epochs=2, **QUIET, **settings)
module = Classifier()
trainer.fit(module, make_loader(shuffle=True))
processes = [psutil.Process()] + ([psutil.Process(os.getppid())] if "TRAINWRIGHT_JOB" in os.environ else [])
print(json.dumps({
    "rank": trainer.global_rank,
    "local_rank": trainer.local_rank,
    "node": trainer.node_rank,
    "nodes": trainer.num_nodes,
    "listening": [c.laddr.ip for each in processes for c in each.net_connections() if c.status == "LISTEN"],
}), flush=True)
if mode in ("raise", "exit"):
    trainer.engine.barrier()  # until both have printed
    if trainer.global_rank == 1:
        raise RuntimeError("boom") if mode == "raise" else SystemExit(3)
if mode != "train":
    time.sleep(600)  # in no collective, so that nothing but the launchers tells it of the other node
if trainer.is_global_zero:
    torch.save(weights(module), "weights.pt")
"""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    (tmp_path / "train.py").write_text(SCRIPT)
    with machines(tmp_path) as network:
        yield network


def launch(node: int) -> list[str]:
    place = ["--num-nodes", "2", "--node-rank", str(node), "--main-address", ADDRESSES[0], "--main-port", "29511"]
    return python("-m", "trainwright", "launch", *place)


def torchrun(node: int) -> list[str]:
    place = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", ADDRESSES[0], "--master-port", "29512"]
    return python("-m", "torch.distributed.run", "--nproc-per-node", "1", *place)


def slurm(node: int) -> dict[str, str]:
    """The variables that srun sets for the only task of a node."""
    return {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "10.77.0.[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": str(node),
        "SLURM_NODEID": str(node), "SLURM_LOCALID": "0",
    }  # fmt: skip


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights that two processes on one node end with."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "train.py").write_text(SCRIPT)
    run_ranks(interpret, (["train.py", "train", '{"devices": 2}'],), 2, folder, 120.0)
    return torch.load(folder / "weights.pt")


@pytest.mark.parametrize("way", [
    "launch",
    pytest.param("torchrun", marks=pytest.mark.slow),
    pytest.param("script", marks=pytest.mark.slow),
    pytest.param("slurm", marks=pytest.mark.slow),
])  # fmt: skip
def test_two_nodes_end_as_one(network: Network, one_node: dict[str, torch.Tensor], way: str) -> None:
    jobs = []
    for node in (0, 1):
        if way in ("launch", "torchrun"):
            command = {"launch": launch, "torchrun": torchrun}[way](node)
            jobs.append(network.start(node, [*command, "../train.py", "train", "{}"]))
        elif way == "script":
            place = {"NODE_RANK": str(node), "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29513"}
            settings = '{"num_nodes": 2, "devices": 1}'
            jobs.append(network.start(node, python("../train.py", "train", settings), **place))
        else:
            jobs.append(network.start(node, python("../train.py", "train", "{}"), **slurm(node)))
    for node, job in enumerate(jobs):
        assert job.wait() == 0, job.stderr
        (line,) = [line.partition("] ")[2] or line for line in job.stdout.splitlines() if '"listening"' in line]
        seen = json.loads(line)
        listening = set(seen.pop("listening"))
        assert seen == {"rank": node, "local_rank": 0, "node": node, "nodes": 2}
        assert listening == {ADDRESSES[node]}, f"{way} on node {node}"
        job.check_nothing_left()
    assert_equal(torch.load(network.folder / "node0" / "weights.pt"), one_node)


def start_both(network: Network, mode: str) -> list[Started]:
    """Start a job whose nodes have different commands."""
    command = lambda node: [*launch(node), "--job-id", "mine", "../train.py", mode, "{}", f"--node={node}"]  # noqa: E731
    jobs = [network.start(node, command(node)) for node in (0, 1)]
    for job in jobs:
        job.wait_for('"listening"')
    return jobs


@pytest.mark.parametrize(
    ("mode", "code", "reason"),
    [("raise", 1, "RuntimeError: boom"), pytest.param("exit", 3, "exit code 3", marks=pytest.mark.slow)],
)
def test_a_failed_rank_ends_both_nodes_and_is_named_on_both(
    network: Network, mode: str, code: int, reason: str
) -> None:
    jobs = start_both(network, mode)
    began = time.monotonic()
    for job in jobs:
        assert job.wait() == code
        job.check_nothing_left()
        assert time.monotonic() - began < deadline(GONE_SECONDS)
        assert "trainwright: rank 1 of 2, on node 1 (" in job.stderr
        assert f"failed first ({reason}); the job was ended.\n" in job.stderr
        for text in ("Traceback", "RuntimeError: boom\n"):
            assert job.stderr.count(text) == (mode == "raise")


@pytest.mark.slow
@pytest.mark.parametrize(("node", "number", "text"), [
    (0, signal.SIGKILL, "the launcher of node 0, the main node, has ended"),
    (1, signal.SIGKILL, "(its node was lost: the launcher there has ended or cannot be reached)"),
    (1, signal.SIGTERM, "failed first (SIGTERM stopped its launcher)"),
])  # fmt: skip
def test_a_launcher_that_ends_takes_both_nodes_with_it(network: Network, node: int, number: int, text: str) -> None:
    jobs = start_both(network, "wait")
    assert [len(job.processes()) for job in jobs] == [3, 3]
    jobs[node].process.send_signal(number)
    began = time.monotonic()
    for job in jobs:
        job.check_nothing_left()
    assert time.monotonic() - began < deadline(GONE_SECONDS)
    other = jobs[1 - node]
    assert other.wait() == 1
    assert text in other.stderr
    assert jobs[node].wait() == (-number if number == signal.SIGKILL else 128 + number)
