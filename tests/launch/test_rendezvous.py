"""How the launchers of several nodes meet; here all on this machine, over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from deadlines import deadline, wait_until

from trainwright.errors import LaunchError
from trainwright.launch.nodes import Nodes, nodes_of
from trainwright.launch.rendezvous import StaticRendezvous


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Meeting:
    """Nodes that meet at one port, without those that were refused."""

    def __init__(self) -> None:
        self.port = free_port()
        self.came: list[StaticRendezvous] = []
        self.threads: list[threading.Thread] = []

    def come(self, count: int, rank: int, num_processes: int = 1) -> StaticRendezvous:
        self.came.append(StaticRendezvous(Nodes(count, rank, port=self.port), num_processes))
        return self.came[-1]

    def wait(self, node: StaticRendezvous) -> None:
        """Let a node wait for the others in a thread."""
        self.threads.append(threading.Thread(target=node.next_rendezvous, daemon=True))
        self.threads[-1].start()

    def check_met(self) -> None:
        for thread in self.threads:
            thread.join(timeout=deadline(30))
            assert not thread.is_alive()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting()
    yield meeting
    meeting.check_met()
    for node in reversed(meeting.came):  # the main one last, as it holds the store
        node.leave()


def test_nodes_meet_and_know_each_other(meeting: Meeting) -> None:
    main = meeting.come(2, 0)
    meeting.wait(main)
    other = meeting.come(2, 1, num_processes=2)
    other.next_rendezvous()
    meeting.check_met()
    assert [member.num_processes for member in main.members] == [1, 2]  # nodes may run different numbers of processes
    assert main.members == other.members
    assert [main.node_of(rank) for rank in range(3)] == [0, 1, 1]
    assert main.heartbeat is not None
    assert main.heartbeat.lost() == []
    assert other.heartbeat is not None
    other.heartbeat.close()  # as the kernel does when a launcher ends
    wait_until(main.heartbeat.lost)
    assert main.heartbeat.lost() == [1]
    assert not main.has_left(1)


def test_nodes_that_do_not_belong_together_are_refused(meeting: Meeting) -> None:
    meeting.wait(meeting.come(3, 0))
    with pytest.raises(LaunchError, match="num_nodes=4 was given to node 1, but 3 to the main node; give all nodes"):
        meeting.come(4, 1).next_rendezvous()
    second = meeting.come(3, 2)
    meeting.wait(second)
    wait_until(lambda: second._agents.check(["node/2"]))
    with pytest.raises(LaunchError, match="node_rank=2 was given to two nodes; give each its own number, from 0 to 2"):
        meeting.come(3, 2).next_rendezvous()
    meeting.come(3, 1).next_rendezvous()


def test_a_main_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        with pytest.raises(LaunchError, match=rf"port {port} of 127.0.0.1 cannot be listened on"):
            StaticRendezvous(Nodes(2, 0, port=port), 1)


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ((0,), "num_nodes=0 is not a whole number from 1"),
        ((2, 2, "a", 29500), "node_rank=2 is out of range for num_nodes=2; nodes are numbered from 0 to 1"),
        ((2, 0, "a", 0), "main_port=0 is not a port"),
        ((1, 0, "a", 70000), "main_port=70000 is not a port; pass one from 1 to 65535"),
    ],
)
def test_wrong_nodes_are_refused(nodes: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Nodes(*nodes)  # type: ignore[arg-type]


def test_a_script_reads_its_node_from_the_environment() -> None:
    variables = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    assert nodes_of(1, variables) == Nodes()
    assert nodes_of(2, variables) == Nodes(2, 1, "10.0.0.1", 29500)
    assert nodes_of(2, variables | {"MASTER_PORT": "31000"}).port == 31000
    with pytest.raises(ValueError, match="num_nodes=2 was given, but the environment has no NODE_RANK; set NODE_RANK"):
        nodes_of(2, {"MASTER_ADDR": "a"})
