"""Elastic: the launcher on one of several machines, on torch elastic's public API.

Elastic brings the machines together and restarts them. Its worker is one NodeSupervisor on each machine, which runs the
ranks. The main node serves the store at which all meet.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainwright.distributed.failures import FailureLog
from trainwright.distributed.job_store import STORE_PREFIX, Store, join_store, post, serve_store, stores
from trainwright.distributed.network import is_listening, is_own_address, is_own_name, listen_at, resolve
from trainwright.distributed.signals import ENDING_SIGNALS
from trainwright.errors import LaunchError
from trainwright.launch.node_supervisor import JOINED, NODE_LOST, START_VARIABLE, NodeFolder
from trainwright.launch.nodes import Job, JobOutcome, Place
from trainwright.launch.reception import SILENCE_SECONDS, Reception, say
from trainwright.launch.supervisor import ENTRY, catch_signals

NAME = "trainwright"
NOTICE_SECONDS = 5.0  # after which a launcher prints whom it is waiting for
LAST_CALL_SECONDS = 3  # that a restart with enough nodes waits for more
KEEP_ALIVE = {"keep_alive_interval": 2, "keep_alive_max_attempt": 4}
"""A launcher that has been silent for 2 x 4 s does not take part in a restart."""
WATCH_SECONDS = 0.2
STORE_SECONDS = 60.0  # for a request to the store
CLOSE_SECONDS = 3.0  # for the main thread to end by itself
SUPERVISOR_KILLED = "the supervisor of this node was killed"
LEAVE_SECONDS = 10.0  # that the main node keeps the store for the others at the end
MAIN_IS_GONE = (
    "the launcher of node 0, the main node, has ended or cannot be reached; the nodes meet there, so the job ends. Start it "
    "again on all nodes, the main one included."
)


class NodeEnded(Exception):
    """This machine's part of the job is over."""

    def __init__(self, outcome: JobOutcome) -> None:
        self.outcome = outcome


def run_node(job: Job) -> JobOutcome:
    """Run a job's ranks on this machine, one of several, to the end of the job."""
    for name in ("torch.distributed.elastic", "torchelastic"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())  # without a handler, Python prints its warnings
        logger.propagate = False
    if job.logs is not None:
        os.makedirs(job.logs, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trainwright-", ignore_cleanup_errors=True) as folder:
        return NodeLauncher(job, folder).run()


class NodeLauncher(RendezvousHandler):
    """The launcher of one node: elastic's rendezvous, over a store that listens at the main node's address only.

    A node that is not given its number is the main one if the address is its own.

    Args:
        job: its command, and this machine's place.
        folder: an empty one, for the files that this process and its supervisors exchange.

    Raises:
        LaunchError: the port is taken, the address is not the main node's, or the main node rejects this one.
    """

    def __init__(self, job: Job, folder: str) -> None:
        self._job, self._nodes, self._folder = job, job.nodes, NodeFolder(folder)
        self._signal = self._restarts = self._arrival = 0
        self._is_over = threading.Event()
        self._answered_at = time.monotonic()
        self._place: Place | None = None
        self._arrivals: list[int] = []
        """The arrival numbers of the nodes of the current start."""
        catch_signals(self._on_signal, *ENDING_SIGNALS)
        self._base, is_main = self._open_store()
        self._store = stores().PrefixStore("launchers", self._base)
        self._reception = Reception(self._nodes, self._describe()) if is_main else None
        self._arrival = 0 if is_main else int(self._store.add("arrivals", 1))
        for target, arguments in ((self._watch, (self._base.clone(),)), (self._watch_answers, ())):
            threading.Thread(target=target, args=arguments, daemon=True).start()
        if not is_main:
            self._arrive()
        # Otherwise elastic opens another store, on all interfaces, which a node that joins later waits for in vain.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        seconds = {"join": self._nodes.wait_seconds + 2 * LAST_CALL_SECONDS, "last_call": LAST_CALL_SECONDS}
        store = stores().PrefixStore("elastic", self._base)
        self._elastic = DynamicRendezvousHandler.from_backend(
            NAME,
            store,
            C10dRendezvousBackend(store, NAME),
            self._nodes.least,
            self._nodes.count,
            socket.gethostname(),
            RendezvousTimeout(**{name: timedelta(seconds=value) for name, value in seconds.items()}),
            **KEEP_ALIVE,
        )

    def run(self) -> JobOutcome:
        """Run this node's ranks until the job, or this node's part in it, is over."""
        rendezvous_handler_registry.register(NAME, lambda _: self)
        config = LaunchConfig(
            self._nodes.least,
            self._nodes.count,
            nproc_per_node=1,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            run_id=NAME,
            role=NAME,
            rdzv_backend=NAME,
            max_restarts=self._job.max_restarts,
            monitor_interval=0.3,
            signals_to_handle="",  # they are handled here
        )
        outcome, text = JobOutcome(1), ""
        try:
            elastic_launch(config, sys.executable)(ENTRY, "node", *sys.path)
            outcome = self._last_outcome() or outcome
        except NodeEnded as end:
            outcome = end.outcome
        except ChildFailedError:
            outcome = self._last_outcome() or JobOutcome(1, SUPERVISOR_KILLED)
        except LaunchError as error:
            text = str(error)
            raise
        except RuntimeError as error:  # of a request to the store
            raise LaunchError(MAIN_IS_GONE) from error
        finally:
            self._leave(outcome.code, text)
        return outcome

    # The rendezvous, as elastic calls it.

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the nodes of the next start and describe it to this node's supervisor."""
        last = self._last_outcome()
        if self._signal or self._is_ending():
            raise NodeEnded(last or JobOutcome(128 + self._signal))
        if self._place is None:
            self._wait_for_start()
        elif last is None:
            last = JobOutcome(1, SUPERVISOR_KILLED)
            self._post_failure(self._base, self._place, self._place.node, SUPERVISOR_KILLED)
        try:
            info = self._elastic.next_rendezvous()
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:
            raise NodeEnded(self._end_of_job(last)) from error
        except RendezvousTimeoutError as error:
            missing = "the other nodes" if self._reception is None else self._reception.describe_missing()
            raise LaunchError(f"waited {self._nodes.wait_seconds:g} s for {missing}, to start the ranks.") from error
        except RendezvousConnectionError as error:
            raise LaunchError(MAIN_IS_GONE) from error
        self._restarts += last is not None and last.reason != JOINED
        self._place = place = self._find_place(info)
        self._say_start(last, place)
        is_range = self._nodes.rank is None and self._restarts < self._job.max_restarts
        start: dict[str, Any] = {
            "job": {**asdict(self._job), "nodes": {}},
            "place": place._asdict(),
            "least": self._nodes.least if is_range else 0,
            "folder": str(self._folder.path),
            "launcher": os.getpid(),
        }
        os.environ[START_VARIABLE] = json.dumps(start)
        return RendezvousInfo(info.store, place.node, info.world_size, RendezvousStoreInfo(place.address, place.port))

    def _find_place(self, info: RendezvousInfo) -> Place:
        """Number the nodes of a start: by their given numbers, or as they arrived."""
        own = {**self._describe(), "arrival": self._arrival, "restarts": self._restarts}
        info.store.set(f"member/{info.rank}", json.dumps(own))
        members = [json.loads(info.store.get(f"member/{rank}")) for rank in range(info.world_size)]
        members.sort(key=lambda member: (member["node_rank"] or 0, member["arrival"]))
        if info.rank == 0:
            info.store.set("start", str(self._store.add("starts", 1) - 1))
        counts, hosts, self._arrivals, restarts = (
            [member[name] for member in members] for name in ("num_processes", "host", "arrival", "restarts")
        )
        self._restarts = max(restarts)
        node, start = self._arrivals.index(self._arrival), int(info.store.get("start"))
        return Place(self._nodes.address, self._nodes.port, tuple(counts), tuple(hosts), node, start)

    @property
    def use_agent_store(self) -> bool:
        return True  # the ranks use this store too

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return NAME

    def is_closed(self) -> bool:
        return bool(self._elastic.is_closed())

    def set_closed(self) -> None:
        self._elastic.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for a start. Elastic restarts the ranks for them, unless the ranks end anyway."""
        assert self._place is not None
        has_finished = self._base.check([f"nodes/{self._place.start}/finished/{self._place.node}"])
        if has_finished or self._failures(self._place, self._base).count() > 0:
            return 0
        return int(self._elastic.num_nodes_waiting())

    def shutdown(self) -> bool:
        """Close the rendezvous, unless only this node leaves. Elastic calls it when its agent ends."""
        has_failed = self._last_outcome() is not None and not self._is_ending()
        return bool(self._elastic.shutdown()) if self._reception is not None or has_failed else True

    # This node, before and between the starts.

    def _open_store(self) -> tuple[Any, bool]:
        """Serve or find the job's store. Return it, and whether this is the main node."""
        nodes = self._nodes
        number = self._resolve()
        is_main = nodes.rank == 0
        if nodes.rank is None and is_own_address(nodes.address):
            # Otherwise another launcher on this machine is the main one.
            is_main = not is_listening(nodes.address, nodes.port)
        if not is_main:
            where = f"the main node at {nodes.address} port {nodes.port}"
            self._wait(lambda _: is_listening(nodes.address, nodes.port), lambda: where)
            return join_store(nodes.address, nodes.port, timedelta(seconds=STORE_SECONDS)), False
        if is_own_name(nodes.address, number):
            raise LaunchError(
                f"the main address {nodes.address!r} is {number} on this node, which no other node can reach. Give this "
                "node's IP address as the main address."
            )
        return serve_store(listen_at(nodes.address, nodes.port), nodes.address), True

    def _resolve(self) -> str:
        """Return the number of the main address. In Kubernetes a name is known a while after its pod has started."""
        deadline = time.monotonic() + min(self._nodes.wait_seconds, STORE_SECONDS)
        while True:
            try:
                return resolve(self._nodes.address)[1]
            except LaunchError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def _describe(self) -> dict[str, Any]:
        node = {"host": socket.gethostname(), "num_processes": self._job.num_processes, "node_rank": self._nodes.rank}
        terms = [str(self._nodes), f"max_restarts={self._job.max_restarts}"]
        return {**node, "job": self._job.name, "time": time.time(), "terms": terms}

    def _arrive(self) -> None:
        """Ask the main node to admit this one."""
        answer = f"answer/{self._arrival}"
        post(self._store, f"arrival/{self._arrival}", json.dumps(self._describe()))
        where = f"the launcher of node 0 at {self._nodes.address} port {self._nodes.port} to admit this one"
        self._wait(lambda _: self._store.check([answer]), lambda: where, limit=STORE_SECONDS)
        if reason := self._store.get(answer).decode():
            raise LaunchError(f"the main node at {self._nodes.address} rejected this one: {reason}")

    def _wait_for_start(self) -> None:
        """Wait until enough nodes have come for the first start."""
        reception = self._reception
        if reception is not None:
            limit = self._nodes.wait_seconds
            self._wait(lambda waited: reception.is_complete(is_over=waited >= limit), reception.describe_missing)
            post(self._store, "news", "")
        waited_for = "the main node, which waits for others"
        self._wait(lambda _: self._store.check(["news"]), lambda: waited_for, limit=float("inf"))
        if news := self._store.get("news").decode():
            raise LaunchError(f"the main node has ended the job: {news}")

    def _say_start(self, last: JobOutcome | None, place: Place) -> None:
        then = f"restarting all ranks on {len(place.hosts)} node(s)"
        if self._restarts and not (last is not None and last.reason == JOINED):
            then += f", restart {self._restarts} of {self._job.max_restarts}"
        if last is not None:
            say(f"{last.reason}; {then}.\n{last.rest}".rstrip("\n"))
        elif place.start:
            say(f"this node joins as node {place.node}; {then}.")
        elif self._nodes.rank is None:
            say(f"this is node {place.node} of {len(place.hosts)}.")

    def _last_outcome(self) -> JobOutcome | None:
        return None if self._place is None else self._folder.read_outcome(self._place.start)

    def _is_ending(self) -> bool:
        """Return whether the latest start was this node's last one."""
        last = self._last_outcome()
        return last is not None and not (last.reason and last.may_restart)

    def _failures(self, place: Place, base: Store) -> FailureLog:
        return FailureLog(stores().PrefixStore(f"{STORE_PREFIX}/{place.start}", base))

    def _end_of_job(self, last: JobOutcome | None) -> JobOutcome:
        """Return how the job has ended, as seen by a node that wanted to take part in the next start."""
        if last is not None and last.reason != JOINED:
            return last
        self._wait(lambda _: self._store.check(["ended"]), lambda: "the end of the job", limit=STORE_SECONDS)
        code = int(self._store.get("ended"))
        see = f", with exit code {code}. See the output of the others" if code else ""
        return JobOutcome(code, rest=f"trainwright: the job has ended without this node{see}.\n")

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on to the supervisor, or end at once if there is none."""
        if not self._is_over.is_set() and not self._is_ending():
            self._signal = self._signal or number
            if not self._folder.send(signal.SIGUSR2 if number == signal.SIGTERM else number):
                self._end_process(128 + number)

    def _end_process(self, code: int, text: str = "") -> None:
        """End this process and the ranks, whatever the main thread waits for."""
        self._folder.send(signal.SIGKILL)  # the ranks end with it
        if text:
            say(text)
        shutil.rmtree(self._folder.path, ignore_errors=True)
        os._exit(code)

    def _wait(self, find: Callable[[float], bool], describe: Callable[[], str], *, limit: float | None = None) -> None:
        """Wait until something is true, given the seconds that have passed. After a while print who is missing."""
        limit = self._nodes.wait_seconds if limit is None else limit
        began, has_printed = time.monotonic(), False
        while not find(waited := time.monotonic() - began):  # polls, so that Python can run signal handlers
            if waited > limit:
                raise LaunchError(
                    f"waited {limit:g} s for {describe()}. Start the job on every node with the same "
                    "number of nodes, main address and port. See whether the others have started, and whether a firewall is "
                    "in between."
                )
            if waited > NOTICE_SECONDS and not has_printed:
                has_printed = True
                say(f"waiting for {describe()}.")
            time.sleep(0.1)

    # The watch, in threads.

    def _watch(self, base: Any) -> None:
        """Show the main node that this one runs. On the main node, admit others and report lost ones."""
        store = stores().PrefixStore("launchers", base)
        while not self._is_over.wait(WATCH_SECONDS):
            try:
                store.add(f"alive/{self._arrival}", 1)
                if self._reception is not None:
                    self._reception.admit(store)
                    lost = [node for node, arrival in enumerate(self._arrivals) if self._reception.is_lost(arrival)]
                    if lost and self._place is not None:
                        self._post_failure(base, self._place, lost[0], NODE_LOST)
                self._answered_at = time.monotonic()
            except RuntimeError:
                self._lose_main()

    def _watch_answers(self) -> None:
        # NOTE: a request to a store that cannot be reached blocks its thread for a quarter of an hour.
        while not self._is_over.wait(1.0):
            if time.monotonic() - self._answered_at > SILENCE_SECONDS:
                self._lose_main()

    def _lose_main(self) -> None:
        if not self._is_over.wait(CLOSE_SECONDS):
            self._end_process(1, MAIN_IS_GONE)

    def _post_failure(self, base: Store, place: Place, node: int, text: str) -> None:
        failures = self._failures(place, base)
        if failures.count() == 0:
            failures.post(place.first_rank(node), text, code=1)

    def _leave(self, code: int, text: str = "") -> None:
        """Leave the job. The main node, which serves the store, waits until all others have left."""
        self._is_over.set()
        with suppress(RuntimeError):  # the main node may have gone
            if self._reception is None:
                post(self._store, f"left/{self._arrival}", "1")
                return
            post(self._store, "ended", str(code))
            if self._place is None:
                post(self._store, "news", text or "see its output")
            deadline = time.monotonic() + LEAVE_SECONDS
            while time.monotonic() < deadline:
                self._reception.admit(self._store)
                living = [f"left/{arrival}" for arrival in self._reception.living() if arrival]
                if not living or self._store.check(living):
                    break
                time.sleep(0.05)
