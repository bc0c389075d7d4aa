"""Sync points: boundaries of the loop on which all ranks agree over the key-value store, without a collective.

    any rank requests it        -> its watcher thread posts the request, and the watchers of all ranks see it
    is_reached(step), first     -> raises the posted number to step + 1, counts this rank, and returns at once
    is_reached(step), later     -> once all ranks have posted, that number is the agreed step
    is_reached(step) is True    at the first boundary not before the agreed step, the same on every rank

No rank misses it, because a collective of the training (the all-reduce of the gradients) lies between two boundaries. A rank at
a boundary knows that all others have left the previous one, and that the store has their posts from there (the count is the
store's receipt). All ranks posted at boundaries before the largest number, m, so every rank sees all posts at m. The host only
queues an accelerator's collectives, and may be many steps ahead of them. During a round a rank therefore waits for its device
before it reads.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable

from trainwright.distributed.job_store import Store

REQUESTS = "requests"  # the number of requests so far, the only key that the watchers read while nothing is requested


class SyncPoints:
    """The sync points of one connection, which its watcher thread polls.

    Args:
        store: the key-value store, on a connection of the loop's thread, or None in a job of one process.
        synchronize: waits until the device has finished its queue, or None if collectives block the host.
    """

    def __init__(
        self, store: Store | None, rank: int, world_size: int, *, synchronize: Callable[[], None] | None = None
    ) -> None:
        self.store, self.rank, self.world_size, self.synchronize = store, rank, world_size, synchronize
        self._counts: Counter[str] = Counter()
        self._entries: weakref.WeakSet[SyncPoint] = weakref.WeakSet()
        self._lock = threading.Lock()

    def make(self, name: str) -> SyncPoint:
        """Return a new sync point. Points of one name pair up by order, so make them in the same order on every rank."""
        point = SyncPoint(self, f"{name}/{self._counts[name]}")
        self._counts[name] += 1
        with self._lock:
            self._entries.add(point)
        return point

    def poll(self, store: Store) -> None:
        """Post this rank's requests and look for the requests of all. The watcher thread calls this, with its connection."""
        with self._lock:
            points = list(self._entries)
        if not points:
            return
        posted = [point.post_request(store) for point in points]
        requests = store.add(REQUESTS, sum(posted))  # after the requests, so that a new count finds them
        for point in points:
            point.poll(store, requests)


class SyncPoint:
    """An action that any rank may request at any time, and that all ranks then take at the same boundary.

    One object serves one run of the loop, for any number of rounds. A request not yet reached when the run ends is dropped.

    NOTE: this needs a collective of all ranks between two boundaries. Under manual optimization, where a step may pass without
    a backward, and in an evaluation, ranks may reach it at different boundaries.
    """

    def __init__(self, job: SyncPoints, name: str) -> None:
        self._job, self._name, self.rank = job, name, job.rank
        self._lock = threading.Lock()  # between the loop and the watcher, but not in request()
        self._has_own_request = False
        self.is_pending = False
        """Whether this rank knows of a request. Until then `is_reached` need not be called."""
        # Only the loop writes these:
        self._round, self._posted_round = 0, -1
        self._agreed_step: int | None = None
        # Only the watcher writes these:
        self._requested_round = -1
        self._polled: tuple[int, int] | None = None

    def request(self) -> None:
        """Request the action, from any rank, thread or signal handler. Never blocks.

        `is_reached` returns True on every rank at some boundary after this call began, unless the run ends before. A request
        during a round joins it.
        """
        self._has_own_request = True
        if self._job.store is None:
            self.is_pending = True

    def claim(self) -> bool:
        """Return whether this rank is the first to claim it, which is true on exactly one rank. Not collective."""
        return self._job.store is None or self._job.store.add(f"{self._name}/claimed", 1) == 1

    def is_reached(self, step: int) -> bool:
        """Return whether the boundary is now. Call at every boundary on every rank, with the same steps, which never decrease.

        Costs one attribute read until something is requested, then a few reads of the store per boundary.
        """
        return self.is_pending and self._advance(step)

    def post_request(self, store: Store) -> bool:
        """Post this rank's request and return whether it was new. The watcher calls this."""
        current = self._round
        if not self._has_own_request or self._requested_round == current:
            return False
        store.set(self._key(current, "requested"), "1")  # the count of requests, which is raised next, is the receipt
        self._requested_round = current
        return True

    def poll(self, store: Store, requests: int) -> None:
        """Look for a request if there are new ones, or a new round has begun. The watcher calls this."""
        current = self._round
        if self._polled == (current, requests):
            return
        is_pending = store.check([self._key(current, "requested")])
        self._polled = (current, requests)
        if is_pending:
            with self._lock:
                # If the loop has finished the round since, the request belonged to it.
                if self._round == current:
                    self.is_pending = True

    def _advance(self, step: int) -> bool:
        store = self._job.store
        if store is None:
            self._has_own_request = self.is_pending = False
            return True
        if self._posted_round != self._round:
            self._post(store, step + 1)
            self._posted_round = self._round
            return False
        if self._agreed_step is None:
            if self._job.synchronize is not None:
                self._job.synchronize()  # NOTE: waits for the device
            if store.add(self._key(self._round, "count"), 0) < self._job.world_size:
                return False
            self._agreed_step = int(store.get(self._key(self._round, "step")))
        if step < self._agreed_step:
            return False
        self._finish_round(store)
        return True

    def _post(self, store: Store, step: int) -> None:
        """Raise the largest number of this round to `step`, and then count this rank."""
        key, largest = self._key(self._round, "step"), ""
        while not largest or int(largest) < step:
            largest = bytes(store.compare_set(key, largest, str(step))).decode()
        store.add(self._key(self._round, "count"), 1)

    def _finish_round(self, store: Store) -> None:
        finished = self._round
        with self._lock:
            self._round, self._agreed_step = finished + 1, None
            self._has_own_request = self.is_pending = False  # requests from here on belong to the next round
        # Every rank has posted in this round, so every rank has finished the previous one.
        for name in ("step", "count", "requested") if finished > 0 and self.rank == 0 else ():
            store.delete_key(self._key(finished - 1, name))

    def _key(self, number: int, name: str) -> str:
        return f"{self._name}/{number}/{name}"
