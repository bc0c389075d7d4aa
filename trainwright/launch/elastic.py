"""The rendezvous of a job's nodes: a store that the main node holds, and the nodes that run every start of the job."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch.distributed.elastic.rendezvous.api import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from trainwright.distributed.failures import FailureLog
from trainwright.distributed.job_store import STORE_PREFIX, Store, post, stores
from trainwright.distributed.network import claim_port, is_own_address, is_own_name, listen_at, resolve
from trainwright.errors import LaunchError
from trainwright.launch.nodes import Nodes
from trainwright.launch.roster import Heartbeat, Member, Roster, Round

STORE_SECONDS = 300.0  # that the store may take to answer the first request
NOTICE_SECONDS = 5.0  # after which a node prints whom it is waiting for
LEAVE_SECONDS = 10.0  # that the main node keeps the store for the others at the end
CUT_SECONDS = 20.0  # between the loss of the main node and the end of a launcher that still waits for its answer
T = TypeVar("T")
GONE = (RuntimeError, OSError)
"""The errors of an attempt to reach the main node after it has gone."""
MAIN_IS_GONE = (
    "the launcher of node 0, the main node, has ended or cannot be reached; the nodes meet there, so the job ends. Start it "
    "again on all nodes, the main one included."
)


class NodeRendezvous(RendezvousHandler):
    """A rendezvous of nodes over a store that listens at the main node's address only.

    For a job of one node it listens on the loopback interface, at a free port. A node that is not given its number is the main
    one if the address is its own. `on_cut` is called in a thread before this process ends because the main node, whose
    answer it waits for, cannot be reached.

    Raises:
        LaunchError: the port is taken, the address is not the main node's, or the main node does not answer.
    """

    def __init__(
        self, nodes: Nodes, num_processes: int, max_restarts: int = 0, on_cut: Callable[[], object] = lambda: None
    ) -> None:
        self.nodes, self._max_restarts, self._on_cut = nodes, max_restarts, on_cut
        self.own = Member(socket.gethostname(), num_processes, nodes.rank)
        self.round = Round(members=[self.own])
        self._port, self._arrival = nodes.port, 0
        self._claim: socket.socket | None = None
        self.store, self.is_main = self._open_store()
        self.heartbeat = Heartbeat(nodes.address, is_main=self.is_main) if nodes.count > 1 else None
        self._agents = stores().PrefixStore("agent", self.store)
        self._has_left = threading.Event()
        self._roster: Roster | None = None
        if self.heartbeat is not None and self.is_main:
            self._roster = Roster(nodes, self._agents, self.heartbeat, self.own)
            post(self._agents, "main", json.dumps({"terms": self._terms(), "heartbeat": self.heartbeat.port}))

    def _open_store(self) -> tuple[Any, bool]:
        """Hold or find the job's store. Return it, and whether this is the main node."""
        if self.nodes.rank is not None:
            return (self._hold_store(), True) if self.nodes.rank == 0 else (self._find_store(), False)
        if not is_own_address(self.nodes.address):
            return self._find_store(), False
        self._claim = claim_port(self.nodes.address, self.nodes.port)
        if self._claim is None:  # another launcher on this machine holds it
            return self._find_store(), False
        try:
            return self._hold_store(), True
        except LaunchError:
            self._claim.close()
            raise

    def _hold_store(self) -> Any:
        _, number = resolve(self.nodes.address)
        if self.nodes.count > 1 and is_own_name(self.nodes.address, number):
            raise LaunchError(
                f"the main address {self.nodes.address!r} is {number} on this node, which no other node can reach. Give this "
                "node's IP address as the main address."
            )
        # TCPStore itself would listen on all interfaces, so it gets a bound socket.
        listener = listen_at(self.nodes.address, self.nodes.port)
        self._port = int(listener.getsockname()[1])
        return stores().TCPStore(
            self.nodes.address, self._port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def _answers(self) -> bool:
        try:
            socket.create_connection((self.nodes.address, self._port), timeout=2.0).close()
        except OSError:
            return False
        return True

    def _find_store(self) -> Any:
        resolve(self.nodes.address)
        self._wait(lambda _: self._answers(), lambda: f"the main node at {self.nodes.address} port {self._port}")
        timeout = timedelta(seconds=STORE_SECONDS)
        return stores().TCPStore(self.nodes.address, self._port, None, False, timeout=timeout, wait_for_workers=False)

    def failures(self, round_number: int) -> FailureLog:
        """Return the failures of the job since a start of it."""
        return FailureLog(cast(Store, stores().PrefixStore(f"{STORE_PREFIX}/{round_number}", self.store)))

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the nodes of the next start and return this node's rendezvous."""
        if self.nodes.count == 1:
            last = self.round
            self.round = Round(last.number + 1, last.number + 1, [0], [self.own])
        elif self._roster is not None:
            self.round = self._roster.start(self._wait(self._choose, self._roster.describe))
        else:
            try:
                self.round = self._join()
            except GONE as error:
                if isinstance(error, (LaunchError, RendezvousGracefulExitError)):
                    raise
                raise LaunchError(f"{MAIN_IS_GONE} ({error})") from error
        info = RendezvousStoreInfo(self.nodes.address, self._port)
        store = stores().PrefixStore(f"round/{self.round.number}", self._agents)
        return RendezvousInfo(store, self.node_rank, self.num_nodes, info)

    def _choose(self, waited: float) -> list[int] | None:
        assert self._roster is not None
        return self._roster.choose(is_over=waited > self.nodes.wait_seconds)

    def _join(self) -> Round:
        assert self.heartbeat is not None
        if self._arrival == 0:
            self._arrive()
        else:
            post(self._agents, f"ready/{self._arrival}", str(self.round.number))
        is_new = self.round.number < 0
        while True:
            found = self._wait(self._next_round, lambda: "the main node, and those that it waits for", has_end=False)
            if self._arrival in found.arrivals:
                return found
            if not is_new:
                raise LaunchError(
                    "the job has started again without this node, whose ranks had not ended in time. Start its launcher again "
                    "to join."
                )
            self.round = Round(found.number, found.restarts)  # without its members
            _say("the job runs on other nodes. This one joins at its next restart, unless the job has its most nodes.")

    def _arrive(self) -> None:
        assert self.heartbeat is not None
        main = json.loads(self._agents.get("main"))
        for own, theirs in zip(self._terms(), main["terms"], strict=True):
            if own != theirs:
                which = "this node" if self.nodes.rank is None else f"node {self.nodes.rank}"
                raise LaunchError(
                    f"{own} was given to {which}, but {theirs} to the main node. Give all nodes of a job the same."
                )
        self._arrival = self._agents.add("arrivals", 1)
        post(self._agents, f"node/{self._arrival}", json.dumps(asdict(self.own)))
        post(self._agents, f"ready/{self._arrival}", "-1")
        # Last: when a node has connected, the main node reads both keys, and would wait for them.
        self.heartbeat.connect(self._arrival, main["heartbeat"])
        threading.Thread(target=self._watch_main, name="trainwright-heartbeat", daemon=True).start()

    def _terms(self) -> list[str]:
        """Return the terms that must be the same on all nodes."""
        return [str(self.nodes), f"max_restarts={self._max_restarts}"]

    def _next_round(self, _: float) -> Round | None:
        """Return the round after this node's last one, or None. Raise if the job has ended."""
        assert self.heartbeat is not None
        if self._agents.check([f"refused/{self._arrival}"]):
            raise LaunchError(self._agents.get(f"refused/{self._arrival}").decode())
        if self._agents.check(["ended"]):
            ended = json.loads(self._agents.get("ended"))
            if ended["code"] == 0:
                _say("the job has ended without this node.")
                raise RendezvousGracefulExitError
            raise LaunchError(f"the main node has ended the job, with exit code {ended['code']}. See its output.")
        if self.heartbeat.lost():
            raise LaunchError(MAIN_IS_GONE)
        if self._agents.check(["latest"]) and (latest := int(self._agents.get("latest"))) > self.round.number:
            return Round.from_json(self._agents.get(f"round/{latest}"))
        return None

    def _watch_main(self) -> None:
        # NOTE: a request to a store that cannot be reached waits for a quarter of an hour, whatever its timeout, and so does
        # the thread that made it.
        assert self.heartbeat is not None
        while not self.heartbeat.lost():
            if self._has_left.wait(1.0):
                return
        if not self._has_left.wait(CUT_SECONDS):
            _say(MAIN_IS_GONE)
            self._on_cut()
            os._exit(1)

    @property
    def node_rank(self) -> int:
        """This node's number in the current round."""
        return self.round.arrivals.index(self._arrival)

    @property
    def num_nodes(self) -> int:
        return len(self.round.members)

    @property
    def world_size(self) -> int:
        return sum(member.num_processes for member in self.round.members)

    def first_rank(self, node: int) -> int:
        return sum(member.num_processes for member in self.round.members[:node])

    def node_of(self, rank: int) -> int:
        return max(node for node in range(self.num_nodes) if self.first_rank(node) <= rank)

    def lost_nodes(self) -> list[int]:
        """Return the lost nodes of this round. Other nodes than the main one only see the main one."""
        if self.heartbeat is None:
            return []
        if self._roster is not None:
            self._roster.admit()
        arrivals = self.round.arrivals
        return [arrivals.index(each) for each in self.heartbeat.lost() if each in arrivals and not self.has_left(each)]

    def say_finished(self, signal_number: int = 0) -> None:
        """Announce that all processes of this node have succeeded, or that this signal (0: none) stopped them."""
        post(self._agents, self._finished(self._arrival), str(signal_number))  # this launcher may end right after

    def all_finished(self) -> bool:
        return bool(self._agents.check([self._finished(each) for each in self.round.arrivals]))

    def signals(self) -> list[int]:
        """Return the numbers that the nodes announced after they finished, in the order of their ranks."""
        return [int(self._agents.get(self._finished(each))) for each in self.round.arrivals]

    def _finished(self, arrival: int) -> str:
        return f"finished/{self.round.number}/{arrival}"

    def has_left(self, arrival: int) -> bool:
        """Return whether a node's launcher has left in an orderly way."""
        return bool(self._agents.check([f"left/{arrival}"]))

    def leave(self, code: int = 1) -> None:
        """Leave the job. The main node, which holds the store, says how it ended and waits until all others have left."""
        if self.heartbeat is None or self._has_left.is_set():
            return
        self._has_left.set()
        try:
            with suppress(RuntimeError):  # the main node may have gone, and its store
                if self.is_main:
                    post(self._agents, "ended", json.dumps({"code": code}))
                if self.is_main or not self.heartbeat.lost():
                    post(self._agents, f"left/{self._arrival}", "1")
            deadline = time.monotonic() + LEAVE_SECONDS
            while self._roster is not None and time.monotonic() < deadline:
                self._roster.admit()
                if all(self.has_left(each) for each in self._roster.living() if each != 0):
                    break
                time.sleep(0.02)
        finally:
            self.heartbeat.close()
            if self._claim is not None:
                self._claim.close()

    # Elastic calls these methods of any rendezvous. This one decides at every start who may join, so it never closes.

    @property
    def use_agent_store(self) -> bool:
        return True  # the workers use this store too

    def get_backend(self) -> str:
        return "trainwright"

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

    def _wait(self, find: Callable[[float], T | None], describe: Callable[[], str], *, has_end: bool = True) -> T:
        """Wait until something is found, given the seconds that have passed. After a while print who is missing."""
        began, has_printed = time.monotonic(), False
        while True:  # polls rather than blocks, so that Python can run signal handlers
            waited = time.monotonic() - began
            if found := find(waited):
                return found
            if has_end and waited > self.nodes.wait_seconds:
                raise LaunchError(
                    f"waited {self.nodes.wait_seconds:g} s for {describe()}. Start the job on every node with the same "
                    "number of nodes, main address and port. See whether the others have started, and whether a firewall is "
                    "in between."
                )
            if waited > NOTICE_SECONDS and not has_printed:
                has_printed = True
                _say(f"waiting for {describe()}.")
            time.sleep(0.1)


def _say(text: str) -> None:
    print(f"trainwright: {text}", file=sys.stderr, flush=True)
