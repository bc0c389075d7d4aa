"""Heartbeat: an open connection between the launchers of a job's nodes, which the kernel closes when one of them ends."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

from trainwright.distributed.network import listen_at

CONNECT_SECONDS = 30.0
SILENCE_SECONDS = 30
"""How long a machine may be unreachable before it counts as lost."""
_NUMBER = struct.Struct("!I")


class Heartbeat:
    """This node's connections: on the main node one to each other node, on another node one to the main node.

    Nodes are known by the number of their arrival; the main node's is 0.
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
        """Accept the connections that wait, without blocking; return the new numbers, from 1 to the highest given so far.

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
