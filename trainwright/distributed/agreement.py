"""Agreement between ranks over the key-value store, without collectives: `Agreement` swaps small payloads between all ranks.

`environment.py` opens the store.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import AbstractContextManager, nullcontext

from trainwright.distributed.store import Store, post
from trainwright.distributed.whereabouts import Locate, Position, Whereabouts

ON_ALL_RANKS = (
    "All ranks make such a call, in the same order: not under `if trainer.is_global_zero:`, and not in a hook that one rank "
    "alone has."
)

SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02
PAUSED_PART = 1 / 32
"""A rank that waits looks again after this part of the time that it has waited for, within the two limits."""
LOOK_SECONDS = 0.5
"""How often a rank that waits looks whether the others are still there."""


class Agreement:
    """Swaps small payloads between all ranks, from any thread, without a collective.

    Args:
        store: the key-value store of the job; None in a job of one process.
        rank: this process's global rank.
        world_size: how many processes the job has.
        name: the channel. Calls pair up by their order in one channel.
        whereabouts: tells where the ranks are, for calls of the main thread; None for a channel of another thread.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        *,
        name: str = "main",
        whereabouts: Whereabouts | None = None,
    ) -> None:
        if store is None and world_size > 1:
            raise ValueError(f"store=None with world_size={world_size}; more than one rank needs a key-value store.")
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._whereabouts = whereabouts
        self._name = name
        self._lock = threading.Lock()
        self._calls = 0
        self._channels: dict[str, int] = {}
        self._has_given_up = False

    def channel(self, name: str) -> Agreement:
        """Return an agreement with a call order of its own, for a thread that runs beside the main one.

        Those of one name pair up by their order: make them on every rank, in the same order. Nothing is sent.
        """
        number = self._channels.get(name, 0)
        self._channels[name] = number + 1
        return Agreement(self._store, self.rank, self.world_size, name=f"{self._name}/{name}/{number}")

    def give_up(self) -> None:
        """Let the call that waits here in another thread, and every later one that would wait, raise (RuntimeError)."""
        self._has_given_up = True

    def following(self, locate: Locate) -> AbstractContextManager[None]:
        """Return a context in which this rank's place is told by a run. Enter it on every rank. See `Whereabouts`."""
        return nullcontext() if self._whereabouts is None else self._whereabouts.following(locate)

    def exchange(self, payload: bytes, *, call: str, timeout_seconds: float) -> list[bytes]:
        """Post this rank's payload and return those of all ranks, by rank. Call on every rank, in the same order.

        `call` says what it is, with the step that it belongs to where there is one; the ranks have to say the same.

        Raises:
            RuntimeError: on every rank alike, where the ranks have come to different calls; on this one, where another has
                gone past the place of this call, or has come to its end.
            TimeoutError: a rank has not come to it.
        """
        if self._store is None:
            return [payload]
        own = Position() if self._whereabouts is None else self._whereabouts.now()
        header = json.dumps([call, own.text]).encode()
        with self._lock:  # calls of two threads of one channel must not overlap, or the deletion below is too early
            number = self._calls
            self._calls += 1
            self._store.set(self._key(number, self.rank), header + b"\n" + payload)
            keys = [self._key(number, rank) for rank in range(self.world_size)]
            self._wait(keys, call, own, timeout_seconds)  # for its own too, which is the store's receipt
            parts = [bytes(self._store.get(key)).split(b"\n", 1) for key in keys]
            # Every rank has posted this call, so every rank has read the one before it.
            if number > 0:
                self._store.delete_key(self._key(number - 1, self.rank))
        if len({json.loads(head)[0] for head, _ in parts}) > 1:
            raise RuntimeError(_told_apart([json.loads(head) for head, _ in parts]))
        return [body for _, body in parts]

    def broadcast(self, payload: bytes | None, *, call: str, timeout_seconds: float) -> bytes:
        """Return rank 0's payload. Call on every rank, in the same order; the other ranks' payloads are ignored."""
        if self.rank == 0 and payload is None:
            raise TypeError("payload=None on rank 0; rank 0 gives the bytes that all ranks get.")
        own = payload if self.rank == 0 and payload is not None else b""
        return self.exchange(own, call=call, timeout_seconds=timeout_seconds)[0]

    def leave(self) -> None:
        """Tell the others that this rank makes no call any more."""
        if self._store is not None:
            post(self._store, f"left/{self.rank}", b"")

    def _refuse_left(self, keys: list[str]) -> None:
        """Say that a rank which is waited for has come to its end (RuntimeError)."""
        assert self._store is not None
        for rank, key in enumerate(keys):
            if not self._store.check([key]) and self._store.check([f"left/{rank}"]) and not self._store.check([key]):
                raise RuntimeError(
                    f"rank {rank} has come to the end of its script, and rank {self.rank} waits for it in a call that every "
                    "rank has to make (fit, validate, test, predict, save_checkpoint). Make it on all ranks: not under "
                    "`if trainer.is_global_zero:`, and without leaving one rank's script early."
                )

    def _key(self, call: int, rank: int) -> str:
        return f"agreement/{self._name}/{call}/{rank}"

    def _wait(self, keys: list[str], call: str, own: Position, timeout_seconds: float) -> None:
        # Polling, because a blocking wait would hold the connection against other threads and run no signal handler.
        assert self._store is not None
        began = looked = time.monotonic()
        deadline = began + timeout_seconds
        missing = [] if self._store.check(keys) else list(reversed(keys))
        while missing:
            # One at a time: all of a thousand at each look would keep the store busy.
            if self._store.check(missing[-1:]):
                missing.pop()
                continue
            if self._has_given_up:
                raise RuntimeError("this rank waits for the others no longer: its run has ended, or they have.")
            now = time.monotonic()
            if now > deadline:
                absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise TimeoutError(
                    f"rank {self.rank} waited {timeout_seconds:g} s in {call} for rank(s) {absent} of {self.world_size}; "
                    "every rank must make this call. See what those ranks are doing, or allow more time."
                )
            if now > looked + LOOK_SECONDS:
                looked = now
                self._refuse_left(keys)
                self._refuse_passed(keys.index(missing[-1]), missing[-1], call, own)
            time.sleep(min(max((now - began) * PAUSED_PART, SHORTEST_PAUSE), LONGEST_PAUSE))

    def _refuse_passed(self, rank: int, key: str, call: str, own: Position) -> None:
        """Ask where a rank is that is waited for; say so where it has left the place of this call behind (RuntimeError)."""
        if self._whereabouts is None:
            return
        assert self._store is not None
        told = self._whereabouts.told(self._store, rank)
        # It posts a call before it goes on, so a call that is not there now was not made.
        if told is not None and told.order > own.order and not self._store.check([key]):
            raise RuntimeError(
                f"rank {self.rank} makes a call that rank {rank} has left out: {call}{_at(own.text)}. Rank {rank} is past "
                f"that{_at(told.text)}. {ON_ALL_RANKS}"
            )
        self._whereabouts.ask(self._store, rank)


def _told_apart(calls: list[tuple[str, str]]) -> str:
    """Return the error of ranks that have come to different calls, from each one's call and place."""
    here, at_here = calls[0]
    rank, (there, at_there) = next((rank, each) for rank, each in enumerate(calls) if each[0] != here)
    return (
        f"the ranks have come to different calls: rank 0 to {here}{_at(at_here)}, rank {rank} to {there}{_at(at_there)}. "
        f"{ON_ALL_RANKS}"
    )


def _at(text: str) -> str:
    return f" ({text})" if text else ""
