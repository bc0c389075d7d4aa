"""Rank positions: how a rank that waits in a call finds out that another rank has already moved past it.

Nothing is sent unless a rank waits. After a while the waiting rank requests the position of the one that it waits for. That
rank's watcher thread answers, because its main thread may be blocked in a collective which waits for the first rank in turn.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from trainwright.distributed.store import Store

Locate = Callable[[], tuple[tuple[int, ...], str]]
"""Returns counters that only grow in a run and are equal on all ranks at the same point of it, and that point in words."""


class RankPosition(NamedTuple):
    """Where a rank is in the sequence that all ranks go through."""

    order: tuple[int, ...] = ()
    """The larger one of two ranks is further on."""
    text: str = ""
    """The position in words; empty if unknown."""


class RankPositions:
    """Reports this rank's position and requests those of others. Thread-safe."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._runs = 0
        self._locate: Locate | None = None
        self._lock = threading.Lock()
        self._answered = 0

    def locate_by(self, locate: Locate) -> None:
        """Take positions from here on from a loop whose end is unknown. Call it on every rank."""
        with self._lock:
            self._runs, self._locate = self._runs + 1, locate

    @contextmanager
    def located_by(self, locate: Locate) -> Iterator[None]:
        """Take positions from a run during the block. Enter it on every rank; an inner run replaces the outer one."""
        outer = self._locate
        # Counted on entering and on leaving, so that a rank that has left a run is further on than one that is still in it.
        with self._lock:
            self._runs, self._locate = self._runs + 1, locate
        try:
            yield
        finally:
            with self._lock:
                self._runs, self._locate = self._runs + 1, outer

    def now(self) -> RankPosition:
        with self._lock:
            runs, locate = self._runs, self._locate
        counts, text = ((), "") if locate is None else locate()
        return RankPosition((runs, *counts), text)

    def answer(self, store: Store) -> None:
        """For the watcher: post this rank's position if it was requested since the last answer. One read of the store."""
        requested = store.add(_request_key(self._rank), 0)
        if requested == self._answered:
            return
        # `locate` reads counters that the main thread changes meanwhile; if that fails, the next request is answered.
        with suppress(Exception):
            store.set(_reply_key(self._rank), json.dumps(self.now()))
            self._answered = requested

    def request(self, store: Store, rank: int) -> None:
        """Request another rank's position; a later `reported` returns it."""
        store.add(_request_key(rank), 1)

    def reported(self, store: Store, rank: int) -> RankPosition | None:
        """Return the position that another rank has reported last; None if it has not."""
        if not store.check([_reply_key(rank)]):
            return None
        order, text = json.loads(store.get(_reply_key(rank)))
        return RankPosition(tuple(order), text)


def _request_key(rank: int) -> str:
    return f"position/{rank}/requested"


def _reply_key(rank: int) -> str:
    return f"position/{rank}"
