"""Roster: the job's nodes as the main node knows them, and their connections. It chooses the nodes of the next start."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from trainwright.distributed.job_store import Store, post
from trainwright.distributed.network import listen_at
from trainwright.launch.nodes import Nodes

CONNECT_SECONDS = 30.0
SILENCE_SECONDS = 30
"""How long a machine may be unreachable before it counts as lost."""
_NUMBER = struct.Struct("!I")


class Heartbeat:
    """This node's connections: on the main node to all other nodes, on another node to the main node.

    Nodes are known by the number of their arrival. The main node's is 0.
    """

    def __init__(self, address: str, *, is_main: bool) -> None:
        self._address = address
        self._listener = listen_at(address, 0) if is_main else None
        if self._listener is not None:
            self._listener.setblocking(False)
        self._strangers: list[socket.socket] = []
        """Connections that have not sent their number yet."""
        self._peers: dict[int, socket.socket] = {}

    @property
    def port(self) -> int:
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    def connect(self, number: int, port: int) -> None:
        """Connect this node, which has this number, to the main node."""
        peer = socket.create_connection((self._address, port), timeout=CONNECT_SECONDS)
        peer.sendall(_NUMBER.pack(number))
        self._keep(0, peer)

    def accept(self, highest: Callable[[], int]) -> list[int]:
        """Accept the connections that wait, without blocking. Return the new numbers, from 1 to the highest given so far.

        `highest` is called once a number has arrived, since a node gets one right before it connects.
        """
        assert self._listener is not None
        while True:
            try:
                self._strangers.append(self._listener.accept()[0])
            except BlockingIOError:
                break
        new = []
        for peer in list(self._strangers):
            peer.setblocking(False)
            try:
                # Peeked, so that a number of which only a part has arrived stays for the next look.
                data = peer.recv(_NUMBER.size, socket.MSG_PEEK)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if 0 < len(data) < _NUMBER.size:
                continue
            self._strangers.remove(peer)
            number = _NUMBER.unpack(peer.recv(_NUMBER.size))[0] if data else 0
            if 0 < number <= highest() and number not in self._peers:
                self._keep(number, peer)
                new.append(number)
            else:  # not a node of this job
                peer.close()
        return new

    def _keep(self, number: int, peer: socket.socket) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):  # otherwise the kernel probes a silent machine every two hours
            # Half of the time without a sign, then three probes a sixth apart: SILENCE_SECONDS in all.
            for option, value in (("TCP_KEEPIDLE", SILENCE_SECONDS // 2), ("TCP_KEEPINTVL", SILENCE_SECONDS // 6)):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._peers[number] = peer

    def close(self) -> None:
        for connection in (self._listener, *self._strangers, *self._peers.values()):
            if connection is not None:
                connection.close()

    def lost(self) -> list[int]:
        """Return the numbers of the nodes whose launcher has ended, or whose machine cannot be reached."""
        return [number for number, peer in list(self._peers.items()) if not _is_open(peer)]

    def living(self) -> list[int]:
        lost = self.lost()
        return sorted(number for number in self._peers if number not in lost)


def _is_open(peer: socket.socket) -> bool:
    try:
        # After its number a node sends nothing, so data of no length is the end that the kernel reports.
        return peer.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


MORE_SECONDS = 30.0  # that a job with enough nodes waits for more, from the latest arrival, before its first start


@dataclass(frozen=True)
class Member:
    """A node of the job, as it describes itself to the others."""

    host: str
    num_processes: int
    node_rank: int | None = None
    """None if the nodes are numbered as they arrive."""


@dataclass(frozen=True)
class Round:
    """One start of the job."""

    number: int = -1
    """-1: not started yet."""
    restarts: int = 0
    """How many of the restarts that are allowed it took."""
    arrivals: list[int] = field(default_factory=list)
    """The arrival numbers of the nodes that run it, in the order of their ranks."""
    members: list[Member] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Round:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "members": [Member(**each) for each in fields["members"]]})


class Roster:
    """On the main node: the nodes that have arrived. Every round takes the ready ones.

    Args:
        nodes: how many the job has.
        store: the launchers' part of the job's store.
        heartbeat: the main node's.
        own: the main node, which has arrival number 0.
    """

    def __init__(self, nodes: Nodes, store: Store, heartbeat: Heartbeat, own: Member) -> None:
        self.round = Round()
        self._nodes, self._store, self._heartbeat = nodes, store, heartbeat
        self._members = {0: own}
        self._refused: set[int] = set()
        self._arrived_at = time.monotonic()

    def admit(self) -> None:
        """Add the nodes that have arrived. Refuse one whose number another has, before the first start."""
        for arrival in self._heartbeat.accept(lambda: self._store.add("arrivals", 0)):
            member = Member(**json.loads(self._store.get(f"node/{arrival}")))
            others = [self._members[each].node_rank for each in self.living()]
            self._members[arrival] = member
            self._arrived_at = time.monotonic()
            # A node that comes back later may do so before its loss is noticed here.
            if member.node_rank is not None and member.node_rank in others and self.round.number < 0:
                self._refused.add(arrival)
                text = (
                    f"node_rank={member.node_rank} was given to two nodes. Give each its own number, from 0 to "
                    f"{self._nodes.count - 1}."
                )
                post(self._store, f"refused/{arrival}", text)

    def living(self) -> list[int]:
        """Return the arrival numbers of the nodes whose launchers run, the oldest first."""
        return [0, *(each for each in self._heartbeat.living() if each in self._members and each not in self._refused)]

    def choose(self, *, is_over: bool = False) -> list[int] | None:
        """Return the nodes of the next round in the order of their ranks, or None while it has to wait for some.

        `is_over` says that the time to wait has passed.
        """
        self.admit()
        living = self.living()
        ready = [each for each in living if self._is_ready(each)]
        if set(living) & set(self.round.arrivals) - set(ready) and not is_over:
            return None  # ranks of the last round are still ending
        if self._nodes.rank is not None:
            by_rank = {self._members[each].node_rank: each for each in reversed(ready)}  # the oldest of each number
            ranks = range(self._nodes.count)
            return [by_rank[rank] for rank in ranks] if len(by_rank) == len(ranks) else None
        if len(ready) < self._nodes.least:
            return None
        is_first = self.round.number < 0
        is_early = (
            is_first and len(ready) < self._nodes.count and time.monotonic() - self._arrived_at < self._more_seconds
        )
        return None if is_early and not is_over else ready[: self._nodes.count]

    def start(self, arrivals: list[int]) -> Round:
        """Announce the next round."""
        last, members = self.round, [self._members[each] for each in arrivals]
        restarts = last.restarts + (last.number >= 0)
        self.round = Round(last.number + 1, restarts, arrivals, members)
        # Before the number of the latest, because nodes that read that fetch this round at once.
        post(self._store, f"round/{self.round.number}", self.round.to_json())
        post(self._store, "latest", str(self.round.number))
        return self.round

    def describe(self) -> str:
        """Return who is missing, in words."""
        ready = [each for each in self.living() if self._is_ready(each)]
        if self._nodes.rank is None:
            hosts = ", ".join(self._members[each].host for each in ready)
            return f"{self._nodes.least} to {self._nodes.count} nodes; {len(ready)} of them are here ({hosts})"
        here = {self._members[each].node_rank for each in ready}
        missing = ", ".join(str(rank) for rank in range(self._nodes.count) if rank not in here)
        return f"node(s) {missing} of {self._nodes.count}"

    @property
    def _more_seconds(self) -> float:
        return min(MORE_SECONDS, self._nodes.wait_seconds)

    def _is_ready(self, arrival: int) -> bool:
        if arrival == 0:
            return True  # it asks
        wanted = self.round.number if arrival in self.round.arrivals else -1
        return int(self._store.get(f"ready/{arrival}")) == wanted
