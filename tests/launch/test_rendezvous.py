"""How the launchers of several nodes meet, here all on this machine over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from deadlines import deadline, wait_until
from trainwright.launch.rendezvous import NodeRendezvous

from trainwright.errors import LaunchError
from trainwright.launch import rendezvous, roster
from trainwright.launch.nodes import Nodes, nodes_of


@pytest.fixture(autouse=True, scope="module")
def _process_stays() -> Iterator[None]:
    """A launcher whose main node is lost ends its process after a while: here the process of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "CUT_SECONDS", deadline(600))
        yield


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Meeting:
    """Nodes that meet at one port, without rejected ones."""

    def __init__(self) -> None:
        self.port = free_port()
        self.came: list[NodeRendezvous] = []
        self.threads: list[threading.Thread] = []

    def come(self, count: int, rank: int, num_processes: int = 1) -> NodeRendezvous:
        self.came.append(NodeRendezvous(Nodes(count, rank, port=self.port, wait_seconds=deadline(30)), num_processes))
        return self.came[-1]

    def wait(self, node: NodeRendezvous) -> None:
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
    assert [member.num_processes for member in main.round.members] == [
        1,
        2,
    ]  # nodes may run different numbers of processes
    assert main.round.members == other.round.members
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
    with pytest.raises(
        LaunchError, match=r"num_nodes=4 was given to node 1, but num_nodes=3 to the main node. Give all nodes"
    ):
        meeting.come(4, 1).next_rendezvous()
    second = meeting.come(3, 2)
    meeting.wait(second)
    wait_until(lambda: second._agents.check(["ready/1"]))
    with pytest.raises(LaunchError, match=r"node_rank=2 was given to two nodes. Give each its own number, from 0 to 2"):
        meeting.come(3, 2).next_rendezvous()
    meeting.come(3, 1).next_rendezvous()


class Range(Meeting):
    """Nodes that are numbered as they arrive."""

    def arrive(self, fewest: int, most: int, **settings: float) -> NodeRendezvous:
        nodes = Nodes(most, None, port=self.port, fewest=fewest, **{"wait_seconds": deadline(30), **settings})
        self.came.append(NodeRendezvous(nodes, 1, max_restarts=3))
        return self.came[-1]

    def meet(self, *nodes: NodeRendezvous) -> list[tuple[int, int, int]]:
        """Let nodes meet. Return their places in the round: number, number of nodes, restarts."""
        for node in nodes:
            self.wait(node)
        self.check_met()
        return [(node.node_rank, node.num_nodes, node.round.restarts) for node in nodes]


@pytest.fixture
def range_() -> Iterator[Range]:
    meeting = Range()
    yield meeting
    for node in reversed(meeting.came):
        node.leave(0)
    meeting.check_met()


def test_the_nodes_that_are_left_meet_again_and_others_join_there(range_: Range) -> None:
    main, second, third = (range_.arrive(1, 3) for _ in range(3))
    assert [each.is_main for each in (main, second, third)] == [True, False, False]
    met = range_.meet(main, second, third)
    assert sorted(met) == [(0, 3, 0), (1, 3, 0), (2, 3, 0)]
    assert met[0][0] == 0  # the node that holds the store
    assert main.lost_nodes() == []
    lost = second.node_rank
    assert second.heartbeat is not None
    second.heartbeat.close()
    wait_until(main.lost_nodes)
    assert main.lost_nodes() == [lost]
    assert third.lost_nodes() == []  # the main node tells it
    assert range_.meet(main, third) == [(0, 2, 1), (1, 2, 1)]
    range_.wait(main)  # which waits for the third
    late = range_.arrive(1, 3)
    range_.wait(late)
    wait_until(lambda: late._agents.check(["ready/3"]))
    assert main.num_nodes == 2  # until the next restart
    range_.wait(third)
    range_.check_met()
    assert [(each.node_rank, each.num_nodes, each.round.restarts) for each in (main, third, late)] == [
        (0, 3, 2),
        (1, 3, 2),
        (2, 3, 2),
    ]
    assert main.failures(1).post(0, "boom") == 1
    assert third.failures(2).count() == 0  # every start has another log
    for node in (main, late):
        range_.wait(node)
    assert third.heartbeat is not None
    third.heartbeat.close()  # lost while the others wait for it
    range_.check_met()
    assert [(each.node_rank, each.num_nodes, each.round.restarts) for each in (main, late)] == [(0, 2, 3), (1, 2, 3)]


def test_a_job_with_enough_nodes_waits_a_while_for_more(range_: Range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "MORE_SECONDS", 0.3)
    main, second = range_.arrive(2, 4), range_.arrive(2, 4)
    assert range_.meet(main, second) == [(0, 2, 0), (1, 2, 0)]


def test_too_few_nodes_end_the_job(range_: Range, capfd: pytest.CaptureFixture[str]) -> None:
    main = range_.arrive(2, 4, wait_seconds=0.2)
    with pytest.raises(LaunchError, match=r"waited 0.2 s for 2 to 4 nodes; 1 of them are here"):
        main.next_rendezvous()


def test_nodes_of_different_ranges_are_refused(range_: Range) -> None:
    main = range_.arrive(1, 2)
    assert main.is_main
    with pytest.raises(
        LaunchError, match=r"nodes=1:3 was given to this node, but nodes=1:2 to the main node. Give all"
    ):
        range_.arrive(1, 3).next_rendezvous()
    numbered = NodeRendezvous(Nodes(2, 1, port=range_.port), 1, max_restarts=3)
    with pytest.raises(LaunchError, match="num_nodes=2 was given to node 1, but nodes=1:2 to the main node"):
        numbered.next_rendezvous()
    stubborn = NodeRendezvous(Nodes(2, None, port=range_.port, fewest=1), 1)
    with pytest.raises(LaunchError, match="max_restarts=0 was given to this node, but max_restarts=3 to the main node"):
        stubborn.next_rendezvous()


def test_a_main_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        for rank in (0, None):
            with pytest.raises(LaunchError, match=rf"port {port} of 127.0.0.1 cannot be listened on"):
                NodeRendezvous(Nodes(2, rank, port=port), 1)


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ((0,), "num_nodes=0 is not an integer of at least 1"),
        ((2, 2, "a", 29500), "node_rank=2 is out of range for num_nodes=2; nodes are numbered from 0 to 1"),
        ((2, 0, "a", 0), "main_port=0 is not a port"),
        ((1, 0, "a", 70000), "main_port=70000 is not a port. Pass one from 1 to 65535"),
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
    with pytest.raises(ValueError, match=r"num_nodes=2 was given, but the environment has no NODE_RANK. Set NODE_RANK"):
        nodes_of(2, {"MASTER_ADDR": "a"})
