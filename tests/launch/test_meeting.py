"""How the launchers of several nodes meet. Some are rejected, others wait, and every wait ends at a signal."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from deadlines import deadline
from machines import ADDRESSES, machines
from started import Started, python

from trainwright.distributed import job_store
from trainwright.errors import LaunchError
from trainwright.launch import reception
from trainwright.launch.config import Config, nodes_of, settings_of
from trainwright.launch.nodes import Job, Nodes

SCRIPT = """
import os, time
import trainwright as tw
from small import QUIET, Classifier, make_loader

class Patient(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            print("trains", flush=True)
            while not os.path.exists("go"):
                time.sleep(0.05)
        return super().training_step(batch, batch_idx)

tw.Trainer(max_epochs=1, **QUIET).fit(Patient(), make_loader())
"""
PLACE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def launch(port: int, *options: str, address: str = "127.0.0.1", of: str = "first", quick: str = "pass") -> list[str]:
    """Return a launcher's command. `quick` has shorter times for its waits."""
    program = "import sys; from trainwright.distributed import job_store; from trainwright.launch import elastic; "
    program += f"{quick}; from trainwright.__main__ import main; sys.exit(main())"
    place = ["--main-address", address, "--main-port", str(port)]
    return python("-c", program, "launch", "--cpu", *place, *options, "train.py", of)


def numbered(rank: int, count: int = 2) -> list[str]:
    return ["--num-nodes", str(count), "--node-rank", str(rank)]


@pytest.mark.launch
def test_strangers_are_rejected_by_name_and_the_job_trains_on(tmp_path: Path) -> None:
    with machines(tmp_path) as network:
        for node in (0, 1):
            (tmp_path / f"node{node}").mkdir()
            (tmp_path / f"node{node}" / "train.py").write_text(SCRIPT)
        start = lambda node, *options, **more: network.start(  # noqa: E731
            node, launch(29541, *options, address=ADDRESSES[0], **more)
        )
        jobs = [start(node, *numbered(node)) for node in (0, 1)]
        for job in jobs:
            job.wait_for("trains")
        name = socket.gethostname()
        rejections = {
            "it runs the job 'train.py second', and the main node the job 'train.py first'. Use another port": start(
                1, *numbered(1), of="second"
            ),
            f"node_rank=1 was given to two nodes, {name} and {name}. Give each its own number, from 0 to 1.": start(
                1, *numbered(1)
            ),
            "nodes=2:2 was given to this node, but num_nodes=2 to the main node.": start(1, "--nodes", "2"),
        }
        second_main = start(0, *numbered(0), of="second")
        assert second_main.wait() == 1
        assert f"trainwright: port 29541 of {ADDRESSES[0]} cannot be listened on (Address already" in second_main.stderr
        for text, stranger in rejections.items():
            assert stranger.wait() == 1
            assert f"trainwright: the main node at {ADDRESSES[0]} rejected this one: {text}" in stranger.stderr
        for node in (0, 1):
            (tmp_path / f"node{node}" / "go").touch()
        for job in jobs:
            assert job.wait() == 0, job.stderr
        for text in rejections:
            assert f"trainwright: the launcher on {name} was rejected: {text}" in jobs[0].stderr
        assert jobs[1].stderr.count("trainwright: ") == 0


@contextmanager
def answering(reply: bytes = b"") -> Iterator[tuple[int, threading.Event]]:
    """Run a program that listens, and whose answer is `reply`, or none. Yield its port, and an event: it was asked."""
    connections, was_asked = [], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):  # closed
                while True:
                    connections.append(listener.accept()[0])
                    if connections[-1].recv(1):  # not only a look whether something listens
                        was_asked.set()
                        connections[-1].sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        yield int(listener.getsockname()[1]), was_asked
        listener.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    """Start jobs. Those that a test leaves are ended."""
    (tmp_path / "train.py").write_text(SCRIPT)
    started: list[Started] = []

    def start(command: list[str], **variables: str) -> Started:
        started.append(Started(command, tmp_path, **variables))
        return started[-1]

    yield start
    for job in started:
        job.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.launch
def test_a_wait_in_vain_ends_with_a_reason(jobs: Any) -> None:
    port, seconds = free_port(), str(int(deadline(2)))
    node_2 = jobs(launch(port, *numbered(2, 4), quick="elastic.NOTICE_SECONDS = 0.1"))
    node_2.wait_for_message("waiting for the main node at")
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # such as torchrun's
    too_few = f"waited {seconds} s for node(s) 1, 3 of 4. Start the job on every node with the same number of nodes"
    cases = {
        f"trainwright: {too_few}": jobs(launch(port, *numbered(0, 4), "--rendezvous-seconds", seconds)),
        f"trainwright: the main node has ended the job: {too_few}": node_2,
        "trainwright: waited 1 s for the main node at 127.0.0.1 port": jobs(
            launch(free_port(), *numbered(1), "--rendezvous-seconds", "1")
        ),
        f"trainwright: waited 1 s for the launcher of node 0 at 127.0.0.1 port {store.port} to admit this one": jobs(
            launch(store.port, *numbered(1), quick="elastic.STORE_SECONDS = 1")
        ),
    }
    for text, job in cases.items():
        assert job.wait() == 1
        assert text in job.stderr
        assert "Traceback" not in job.stderr
        job.check_nothing_left()


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"])
def test_another_program_at_the_main_address_is_an_error(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "ANSWER_SECONDS", 1.0)
    with (
        answering(reply) as (port, _),
        pytest.raises(LaunchError, match=f"no store of a job answers at 127.0.0.1 port {port}"),
    ):
        job_store.join_store("127.0.0.1", port, timedelta(seconds=2))


@pytest.mark.launch
def test_sigterm_ends_a_wait_at_once(jobs: Any) -> None:
    quick = "elastic.NOTICE_SECONDS = 0.1"
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free_port()
    waiting = {
        "waiting for the main node, which waits for others": jobs(launch(port, *numbered(1, 3), quick=quick)),
        "waiting for node(s) ": jobs(launch(port, *numbered(0, 3), quick=quick)),
        "waiting for the main node at 127.0.0.1 port": jobs(launch(free_port(), *numbered(1), quick=quick)),
        "waiting for the launcher of node 0 at": jobs(launch(store.port, *numbered(1), quick=quick)),
    }
    with answering() as (first, launcher_asked), answering() as (second, rank_asked):
        asking = [jobs(launch(first, *numbered(1))), jobs(python("train.py"), **PLACE, MASTER_PORT=str(second))]
        for text, job in waiting.items():
            job.wait_for_message(text)
        for was_asked in (launcher_asked, rank_asked):
            assert was_asked.wait(deadline(60))
        for job in (*waiting.values(), *asking):
            job.process.send_signal(signal.SIGTERM)
            assert job.wait(5) in (143, -signal.SIGTERM), job.stderr
            assert "Traceback" not in job.stderr
            job.check_nothing_left()


def test_a_job_with_enough_nodes_waits_a_while_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(4, None, "10.0.0.1", 29500, fewest=2)
    member = {"host": "a", "time": time.time(), "node_rank": None, "job": "train.py", "terms": []}
    store, desk = dist.HashStore(), reception.Reception(nodes, member)
    assert not desk.is_complete(is_over=True)
    assert desk.describe_missing() == "2 to 4 nodes; 1 of them are here (a)"
    store.set("arrival/1", json.dumps(member))
    desk.admit(store)
    assert store.get("answer/1") == b""
    assert not desk.is_complete(is_over=False)
    assert desk.is_complete(is_over=True)
    monkeypatch.setattr(reception, "MORE_SECONDS", 0.0)
    assert desk.is_complete(is_over=False)
    monkeypatch.setattr(reception, "REPLACE_SECONDS", 0.0)
    assert not desk.is_complete(is_over=True)  # the launchers are silent


def test_launchers_with_other_numbers_are_rejected() -> None:
    own = {
        "host": "a",
        "time": time.time(),
        "node_rank": 0,
        "job": "train.py",
        "terms": [str(Nodes(2, 0, "a", 29500)), "max_restarts=0"],
    }
    store, desk = dist.HashStore(), reception.Reception(Nodes(2, 0, "a", 29500), own)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"terms": ["num_nodes=3", "max_restarts=0"]},
         "num_nodes=3 was given to node 1, but num_nodes=2 to the main node."),
        ({"terms": ["num_nodes=2", "max_restarts=1"]},
         "max_restarts=1 was given to node 1, but max_restarts=0 to the main"),
        ({"time": time.time() - 3600}, "its clock differs by 36"),
    ]  # fmt: skip
    for arrival, (other, text) in enumerate(cases, 1):
        store.set(f"arrival/{arrival}", json.dumps({**own, "node_rank": 1, **other}))
        desk.admit(store)
        assert store.get(f"answer/{arrival}").decode().startswith(text)


@pytest.mark.parametrize(("nodes", "text"), [
    ((2, 2, "a", 29500), "node_rank=2 is out of range for num_nodes=2; nodes are numbered from 0 to 1"),
    ((2, 0, "a", 0), "main_port=0 is not a port"),
    ((1, 0, "a", 70000), "main_port=70000 is not a port. Pass one from 1 to 65535"),
])  # fmt: skip
def test_wrong_nodes_are_rejected(nodes: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Nodes(*nodes)


def test_a_script_reads_its_node_from_the_environment() -> None:
    variables = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}

    def nodes(num_nodes: int, variables: dict[str, str]) -> Nodes:
        return nodes_of(settings_of({}, variables, Config(values={"num_nodes": str(num_nodes)})))

    assert nodes(1, variables) == Nodes()
    assert nodes(2, variables) == Nodes(2, 1, "10.0.0.1", 29500, 2)
    assert nodes(2, variables | {"MASTER_PORT": "31000"}).port == 31000
    with pytest.raises(ValueError, match=r"num_nodes=2 needs node_rank .* Set NODE_RANK on every machine, or start"):
        nodes(2, {"MASTER_ADDR": "a"})


def test_a_job_is_named_after_the_command_that_all_nodes_share() -> None:
    command = ["python", "/home/me/train.py", "--lr", "0.1", "hydra.run.dir='/runs/21-14-30'", "--api-key=abcdefgh"]
    assert Job(command, 2).name == "train.py --lr 0.1 --api-key=(not shown)"
    assert Job(command, 2, job_id="mine").name == "mine"
