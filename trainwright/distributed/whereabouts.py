"""Whereabouts: how a rank that waits in a call finds out that another rank has left the place of that call behind.

Nothing is sent while nobody waits. A rank that has waited for a while asks the one that it waits for; that rank's watcher
thread answers, since its main thread may be blocked in a collective that in turn waits for the one that asks.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trainwright.distributed.store import Store

Locate = Callable[[], tuple[tuple[int, ...], str]]
"""Returns counts that grow along a run, alike on every rank at the same place of it, and what the place is in words."""


@dataclass(frozen=True)
class Position:
    """Where a rank is in what all ranks go through in the same order."""

    order: tuple[int, ...] = ()
    """Compares with that of another rank: the larger one is further on."""
    text: str = ""
    """The place in words; empty where nothing is known."""


class Whereabouts:
    """Tells where this rank is, and asks others. Its own thread-safe owner of both.

    Args:
        rank: this process's global rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._runs = 0
        self._locate: Locate | None = None
        self._lock = threading.Lock()
        self._answered = 0

    @contextmanager
    def following(self, locate: Locate) -> Iterator[None]:
        """Take positions from a run while the block lasts. Enter it on every rank; a run within a run takes its place."""
        outer = self._locate
        with self._lock:
            self._runs, self._locate = self._runs + 1, locate
        try:
            yield
        finally:
            with self._lock:
                self._runs, self._locate = self._runs + 1, outer

    def now(self) -> Position:
        """Return where this rank is."""
        with self._lock:
            runs, locate = self._runs, self._locate
        if locate is None:
            return Position((runs,), "")
        counts, text = locate()
        return Position((runs, *counts), text)

    def answer(self, store: Store) -> None:
        """For the watcher: post where this rank is, if another has asked since the last answer. One read of the store."""
        asked = store.add(self._question(self._rank), 0)
        if asked == self._answered:
            return
        # What the main thread changes meanwhile may break a look; the next question has better luck.
        with contextlib.suppress(Exception):
            position = self.now()
            store.set(self._reply(self._rank), json.dumps([position.order, position.text]))
            self._answered = asked

    def ask(self, store: Store, rank: int) -> None:
        """Ask another rank where it is; a later `told` has the answer."""
        store.add(self._question(rank), 1)

    def told(self, store: Store, rank: int) -> Position | None:
        """Return what another rank has answered last; None where it has not."""
        if not store.check([self._reply(rank)]):
            return None
        order, text = json.loads(store.get(self._reply(rank)))
        return Position(tuple(order), text)

    @staticmethod
    def _question(rank: int) -> str:
        return f"where/{rank}/asked"

    @staticmethod
    def _reply(rank: int) -> str:
        return f"where/{rank}"
