"""The rendezvous of a job's nodes: a store that the main node holds, and the nodes that have joined."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainwright.distributed.failures import FailureLog
from trainwright.distributed.network import is_own_name, listen_at, resolve
from trainwright.distributed.store import STORE_PREFIX, Store, post, stores
from trainwright.errors import LaunchError
from trainwright.launch.heartbeat import Heartbeat
from trainwright.launch.nodes import Nodes

JOIN_SECONDS = 300.0  # that the nodes wait for each other
NOTICE_SECONDS = 5.0  # after which a node prints what it is waiting for
LEAVE_SECONDS = 10.0  # that the main node keeps the store for the others at the end


@dataclass(frozen=True)
class Member:
    """A node of the job, as it describes itself to the others."""

    host: str
    num_processes: int


class StaticRendezvous(RendezvousHandler):
    """A rendezvous of a fixed number of nodes over a store that listens at the main node's address only.

    For a job of one node it listens on the loopback interface, at a free port.

    Raises:
        LaunchError: the port is taken, the address is not the main node's, or the main node does not answer.
    """

    def __init__(self, nodes: Nodes, num_processes: int) -> None:
        self.nodes = nodes
        self.members = [Member(socket.gethostname(), num_processes)]
        self._port = nodes.port
        self.store = self._hold_store() if nodes.rank == 0 else self._find_store()
        self.heartbeat = Heartbeat(nodes.rank, nodes.address) if nodes.count > 1 else None
        self._agents = stores().PrefixStore("agent", self.store)
        self._has_met = False

    def _hold_store(self) -> Any:
        _, number = resolve(self.nodes.address)
        if self.nodes.count > 1 and is_own_name(self.nodes.address, number):
            raise LaunchError(
                f"the main address {self.nodes.address!r} is {number} on this node, which no other node can reach; give this "
                "node's IP address as the main address."
            )
        # TCPStore itself would listen on all interfaces, so it gets a bound socket.
        listener = listen_at(self.nodes.address, self.nodes.port)
        self._port = int(listener.getsockname()[1])
        return stores().TCPStore(
            self.nodes.address, self._port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def _find_store(self) -> Any:
        address = (self.nodes.address, self._port)
        resolve(self.nodes.address)

        def answers() -> bool:
            try:
                socket.create_connection(address, timeout=2.0).close()
            except OSError:
                return False
            return True

        _wait(answers, lambda: f"the main node at {address[0]} port {address[1]}")
        timeout = timedelta(seconds=JOIN_SECONDS)
        return stores().TCPStore(*address, None, False, timeout=timeout, wait_for_workers=False)

    def failures(self, restart_count: int) -> FailureLog:
        """Return the failures of the job since its last start."""
        return FailureLog(cast(Store, stores().PrefixStore(f"{STORE_PREFIX}/{restart_count}", self.store)))

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes and return this node's rendezvous."""
        if self.nodes.count > 1 and not self._has_met:
            try:
                self._meet()
            except (dist.DistNetworkError, OSError) as error:
                raise LaunchError(
                    f"the connection to the main node, {self.nodes.address} port {self._port}, broke while the nodes met "
                    f"({error}); see what its launcher has printed, and start the job on all nodes again."
                ) from error
            self._has_met = True
        store = RendezvousStoreInfo(self.nodes.address, self._port)
        return RendezvousInfo(self._agents, self.nodes.rank, self.nodes.count, store)

    def _meet(self) -> None:
        assert self.heartbeat is not None
        own, keys = self.nodes.rank, [f"node/{rank}" for rank in range(self.nodes.count)]
        if own == 0:
            self._agents.set("main", json.dumps({"num_nodes": self.nodes.count, "heartbeat": self.heartbeat.port}))
        main = json.loads(self._agents.get("main"))
        if main["num_nodes"] != self.nodes.count:
            raise LaunchError(
                f"num_nodes={self.nodes.count} was given to node {own}, but {main['num_nodes']} to the main node; give all "
                "nodes of a job the same number."
            )
        if self._agents.add(f"claims/{own}", 1) > 1:
            raise LaunchError(
                f"node_rank={own} was given to two nodes; give each its own number, from 0 to {self.nodes.count - 1}."
            )
        if own != 0:
            self.heartbeat.connect(main["heartbeat"])
        self._agents.set(keys[own], json.dumps(asdict(self.members[0])))

        def missing() -> str:
            return f"node(s) {', '.join(str(rank) for rank, key in enumerate(keys) if not self._agents.check([key]))}"

        _wait(lambda: self._agents.check(keys), lambda: f"{missing()} of {self.nodes.count} at port {self._port}")
        self.members = [Member(**json.loads(self._agents.get(key))) for key in keys]
        if own == 0:
            self.heartbeat.accept(self.nodes.count - 1)

    def first_rank(self, node: int) -> int:
        return sum(member.num_processes for member in self.members[:node])

    def node_of(self, rank: int) -> int:
        return max(node for node in range(len(self.members)) if self.first_rank(node) <= rank)

    def say_finished(self) -> None:
        """Announce that all processes of this node have succeeded."""
        post(self._agents, f"finished/{self.nodes.rank}", "1")  # this launcher may end right after

    def all_finished(self) -> bool:
        return bool(self._agents.check([f"finished/{rank}" for rank in range(self.nodes.count)]))

    def has_left(self, node: int) -> bool:
        """Return whether a node's launcher has left in an orderly way."""
        return bool(self._agents.check([f"left/{node}"]))

    def leave(self) -> None:
        """Leave the job; the main node first waits until all other nodes have left, since it holds the store."""
        if self.heartbeat is None:
            return
        try:
            if self._has_met:
                with suppress(RuntimeError):  # the main node may have gone, and its store
                    post(self._agents, f"left/{self.nodes.rank}", "1")
            deadline = time.monotonic() + LEAVE_SECONDS
            while self._has_met and self.nodes.rank == 0 and time.monotonic() < deadline:
                gone = self.heartbeat.lost()
                if all(self.has_left(rank) for rank in range(self.nodes.count) if rank not in gone):
                    break
                time.sleep(0.02)
        finally:
            self.heartbeat.close()

    # What elastic asks of any rendezvous. The nodes are fixed and no other can join, so it never closes.

    @property
    def use_agent_store(self) -> bool:
        return True  # the workers use this store too

    def get_backend(self) -> str:
        return "static"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return f"trainwright-{os.getpid()}"

    def shutdown(self) -> bool:
        return True  # the store ends with the launcher


def _wait(is_there: Callable[[], bool], describe: Callable[[], str]) -> None:
    """Wait until it is there; say what is missing after a while."""
    began, has_printed = time.monotonic(), False
    while not is_there():  # polls rather than blocks, so that Python can run signal handlers
        waited = time.monotonic() - began
        if waited > JOIN_SECONDS:
            raise LaunchError(
                f"waited {JOIN_SECONDS:g} s for {describe()}; start the job on every node with the same number of nodes, main "
                "address and port. See whether the others have started, and whether a firewall is in between."
            )
        if waited > NOTICE_SECONDS and not has_printed:
            has_printed = True
            sys.stderr.write(f"trainwright: waiting for {describe()}.\n")
            sys.stderr.flush()
        time.sleep(0.1)
