"""Reception: on the main node, admits the launchers of the job and knows which of them run."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Any

from trainwright.distributed.job_store import Store, post
from trainwright.launch.nodes import Nodes

MORE_SECONDS = 30.0  # that a job with enough nodes waits for more, from the latest arrival, before its first start
REPLACE_SECONDS = 5.0  # after which a silent launcher is replaced by another one with its number
SKEW_SECONDS = 4.0  # between the clocks of machines: elastic compares them with its limit of 8 s
SILENCE_SECONDS = 30.0  # how long a machine may be unreachable before it counts as lost


class Reception:
    """On the main node: admits the launchers of the job, rejects others by name, and knows which of them run.

    Launchers are known by the number of their arrival. The main node's is 0.
    """

    def __init__(self, nodes: Nodes, own: dict[str, Any]) -> None:
        self._nodes = nodes
        self._members = {0: own}
        self._pending: dict[int, float] = {}
        """When launchers have arrived that are not admitted yet."""
        self._num_arrivals = 0
        self._last_arrival = time.monotonic()
        self._beats = {0: (0, time.monotonic())}
        """The latest number of every launcher, which counts up while it runs, and the time at which it came."""

    def admit(self, store: Store) -> None:
        """Admit or reject the launchers that have arrived."""
        now = time.monotonic()
        for arrival in self._members:
            beat = store.add(f"alive/{arrival}", 0)
            if beat != self._beats.get(arrival, (-1, 0.0))[0]:
                self._beats[arrival] = beat, now
        while store.check([f"arrival/{self._num_arrivals + 1}"]):
            self._num_arrivals += 1
            self._pending[self._num_arrivals] = now
        for arrival, came_at in list(self._pending.items()):
            try:
                member = json.loads(store.get(f"arrival/{arrival}"))
                rejection = self._find_rejection(member, came_at)
            except (ValueError, KeyError, TypeError):
                member, rejection = {"host": "another machine"}, "it is no launcher of this version"
            if rejection is None:
                continue
            del self._pending[arrival]
            if rejection:
                say(f"the launcher on {member['host']} was rejected: {rejection}")
            else:
                self._members[arrival], self._beats[arrival], self._last_arrival = member, (0, now), now
            post(store, f"answer/{arrival}", rejection)

    def _find_rejection(self, member: dict[str, Any], came_at: float) -> str | None:
        """Return why a launcher is rejected, "" if it is admitted, or None if that cannot be said yet."""
        own, rank = self._members[0], member["node_rank"]
        if member["job"] != own["job"]:
            return (
                f"it runs the job {member['job']!r}, and the main node the job {own['job']!r}. Use another port for one of "
                "them, or give the same --job-id to all nodes of one job."
            )
        if (skew := abs(member["time"] - time.time() + time.monotonic() - came_at)) > SKEW_SECONDS:
            return f"its clock differs by {skew:.0f} s from the main node's. Set the clocks of all nodes, for example by NTP."
        for theirs, ours in zip(member["terms"], own["terms"], strict=True):
            if theirs != ours:
                which = "this node" if rank is None else f"node {rank}"
                return f"{theirs} was given to {which}, but {ours} to the main node. Give all nodes of a job the same."
        for arrival, other in list(self._members.items()):
            if rank is None or other["node_rank"] != rank:
                continue
            if self._beats[arrival][1] > came_at:
                return (
                    f"node_rank={rank} was given to two nodes, {other['host']} and {member['host']}. Give each its own number, "
                    f"from 0 to {self._nodes.count - 1}."
                )
            if time.monotonic() - came_at < REPLACE_SECONDS:
                return None
            del self._members[arrival]  # its launcher has ended, and this one replaces it
        return ""

    def living(self) -> list[int]:
        """Return the arrival numbers of the launchers that run."""
        now = time.monotonic()
        return [arrival for arrival in list(self._members) if now - self._beats[arrival][1] < REPLACE_SECONDS]

    def is_lost(self, arrival: int) -> bool:
        """Return whether a launcher has been silent for too long."""
        return arrival in self._members and time.monotonic() - self._beats[arrival][1] > SILENCE_SECONDS

    def is_complete(self, *, is_over: bool) -> bool:
        """Return whether the job can start. `is_over` says that the time to wait has passed."""
        num_living = len(self.living())
        if num_living >= self._nodes.count:
            return True
        is_late = is_over or time.monotonic() - self._last_arrival > MORE_SECONDS
        return self._nodes.rank is None and num_living >= self._nodes.least and is_late

    def describe_missing(self) -> str:
        """Return who is missing, in words."""
        living = [self._members[arrival] for arrival in self.living()]
        if self._nodes.rank is None:
            hosts = ", ".join(member["host"] for member in living)
            return f"{self._nodes.least} to {self._nodes.count} nodes; {len(living)} of them are here ({hosts})"
        here = {member["node_rank"] for member in living}
        missing = ", ".join(str(rank) for rank in range(self._nodes.count) if rank not in here)
        return f"node(s) {missing} of {self._nodes.count}"


def say(text: str) -> None:
    with suppress(OSError):  # the terminal may have gone
        print(f"trainwright: {text}", file=sys.stderr, flush=True)
