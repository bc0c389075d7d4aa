"""Heartbeat: an open connection between the launchers of a job's nodes, which the kernel closes when one of them ends."""

from __future__ import annotations

import socket
import struct

from trainwright.distributed.network import listen_at

CONNECT_SECONDS = 30.0
SILENCE_SECONDS = 60
"""How long a machine may be unreachable before it counts as lost."""
_RANK = struct.Struct("!I")


class Heartbeat:
    """This node's connections: on the main node (rank 0) one to each other node, on another node one to the main node."""

    def __init__(self, node_rank: int, address: str) -> None:
        self._node_rank = node_rank
        self._address = address
        self._listener = listen_at(address, 0) if node_rank == 0 else None
        self._peers: dict[int, socket.socket] = {}

    @property
    def port(self) -> int:
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    def connect(self, port: int) -> None:
        peer = socket.create_connection((self._address, port), timeout=CONNECT_SECONDS)
        peer.sendall(_RANK.pack(self._node_rank))
        self._keep(0, peer)

    def accept(self, num_peers: int) -> None:
        """Accept the connections of all other nodes, which have connected by now, and refuse any other."""
        assert self._listener is not None
        self._listener.settimeout(CONNECT_SECONDS)
        while len(self._peers) < num_peers:
            peer, _ = self._listener.accept()
            peer.settimeout(CONNECT_SECONDS)
            data = peer.recv(_RANK.size, socket.MSG_WAITALL)
            rank = _RANK.unpack(data)[0] if len(data) == _RANK.size else 0
            if 0 < rank <= num_peers:
                self._keep(rank, peer)
            else:  # not a node of this job
                peer.close()
        self._listener.close()

    def _keep(self, rank: int, peer: socket.socket) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):  # else the kernel probes a silent machine every two hours
            for option, value in (("TCP_KEEPIDLE", SILENCE_SECONDS // 2), ("TCP_KEEPINTVL", SILENCE_SECONDS // 6)):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._peers[rank] = peer

    def close(self) -> None:
        for connection in (self._listener, *self._peers.values()):
            if connection is not None:
                connection.close()

    def lost(self) -> list[int]:
        """Return the numbers of the nodes whose launcher has ended."""
        return [rank for rank, peer in self._peers.items() if not _is_open(peer)]


def _is_open(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
