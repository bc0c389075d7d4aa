"""Store channel: swaps small payloads between all ranks over the key-value store, without a collective."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from trainwright.distributed.rank_positions import Locate, RankPosition, RankPositions
from trainwright.distributed.store import Store, post

ON_ALL_RANKS = (
    "Make such calls on all ranks, in the same order: not under `if trainer.is_global_zero:` or "
    "`if accelerator.is_main_process:`, nor in one rank's hook."
)

SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02
PAUSED_PART = 1 / 32
"""A waiting rank looks again after this part of the time that it has waited, within the two limits."""
LOOK_SECONDS = 0.5
"""How often a waiting rank looks whether the others are still on their way."""


class CallSkipped(RuntimeError):
    """A rank that is waited for has moved past the call."""


class StoreChannel:
    """Swaps payloads between all ranks in the order of their calls; only the main thread's channel has `positions`."""

    def __init__(
        self, store: Store, rank: int, world_size: int, *, name: str = "main", positions: RankPositions | None = None
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._name, self._positions = store, name, positions
        self._lock = threading.Lock()
        self._calls = 0
        self._subchannels: Counter[str] = Counter()
        self._has_given_up = False

    def subchannel(self, name: str) -> StoreChannel:
        """Return a channel for a second thread; make those of one name on every rank, in the same order. Nothing is sent."""
        self._subchannels[name] += 1
        path = f"{self._name}/{name}/{self._subchannels[name]}"
        return StoreChannel(self._store, self.rank, self.world_size, name=path)

    def give_up(self) -> None:
        """Make the call that waits here in another thread, and every later one that would wait, raise RuntimeError."""
        self._has_given_up = True

    def locate_by(self, locate: Locate) -> None:
        """See `RankPositions.locate_by`."""
        if self._positions is not None:
            self._positions.locate_by(locate)

    def located_by(self, locate: Locate) -> AbstractContextManager[None]:
        """See `RankPositions.located_by`."""
        return nullcontext() if self._positions is None else self._positions.located_by(locate)

    def exchange(self, payload: bytes, *, call: str, timeout_seconds: float) -> list[bytes]:
        """Post this rank's payload and return those of all ranks, by rank. Call on every rank, in the same order.

        `call` names the call, with its step if it has one, and must be the same on all ranks.

        Raises:
            RuntimeError: the ranks have met in different calls, or another rank has skipped this call or has exited.
            TimeoutError: a rank has not made it in time.
        """
        own = RankPosition() if self._positions is None else self._positions.now()
        header = json.dumps([call, own.text]).encode()
        with self._lock:  # if calls of two threads overlapped, the deletion below would be too early
            number = self._calls
            self._calls += 1
            self._store.set(self._key(number, self.rank), header + b"\n" + payload)
            keys = [self._key(number, rank) for rank in range(self.world_size)]
            self._wait(keys, call, own, timeout_seconds)  # for its own key too: that is the store's receipt
            parts = [bytes(self._store.get(key)).split(b"\n", 1) for key in keys]
            # Every rank has posted this call, so every rank has read the one before it.
            if number > 0:
                self._store.delete_key(self._key(number - 1, self.rank))
        headers = [json.loads(head) for head, _ in parts]
        if len({other for other, _ in headers}) > 1:
            raise RuntimeError(_different_calls(headers))
        return [body for _, body in parts]

    def announce(self, key: str) -> None:
        """Post a key for the other ranks to find."""
        post(self._store, f"announced/{self._name}/{key}", b"")

    def posted(self, payload: bytes) -> list[bytes | None]:
        """Post this rank's payload, and return those that are there by now, by rank. The rank that posts last sees all."""
        keys = [f"posted/{self._name}/{rank}" for rank in range(self.world_size)]
        post(self._store, keys[self.rank], payload)
        return [bytes(self._store.get(key)) if self._store.check([key]) else None for key in keys]

    def announced(self, keys: Sequence[str], *, call: str, timeout_seconds: float) -> str:
        """Wait until rank 0 has announced one of the keys, and return the first of them.

        Raises:
            RuntimeError: rank 0 has exited.
            TimeoutError: it has announced none in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            has_left = self._store.check(["left/0"])  # looked up first: it announces before it leaves
            for key in keys:
                if self._store.check([f"announced/{self._name}/{key}"]):
                    return key
            if has_left:
                raise RuntimeError(f"rank 0 has exited while rank {self.rank} waits for it in {call}.")
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank} waited {timeout_seconds:g} s in {call} for rank 0.")
            time.sleep(LONGEST_PAUSE)

    def leave(self) -> None:
        """Post that this rank makes no more calls."""
        post(self._store, f"left/{self.rank}", b"")

    def _key(self, call: int, rank: int) -> str:
        return f"exchange/{self._name}/{call}/{rank}"

    def _wait(self, keys: list[str], call: str, own: RankPosition, timeout_seconds: float) -> None:
        # Polls, because a blocking wait would hold the connection against other threads and delay signal handlers.
        began = looked = time.monotonic()
        deadline = began + timeout_seconds
        missing = [] if self._store.check(keys) else list(reversed(keys))
        while missing:
            # One key at a time: checking a thousand each time would keep the store busy.
            if self._store.check(missing[-1:]):
                missing.pop()
                continue
            if self._has_given_up:
                raise RuntimeError("this rank no longer waits for the others: its run has ended, or theirs have.")
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

    def _refuse_left(self, keys: list[str]) -> None:
        for rank, key in enumerate(keys):
            # The key is checked again: the rank may have posted it and left between the first two checks.
            if not self._store.check([key]) and self._store.check([f"left/{rank}"]) and not self._store.check([key]):
                raise RuntimeError(
                    f"rank {rank} has exited while rank {self.rank} waits for it in a call that every rank has to make (fit, "
                    "validate, test, predict, save_checkpoint, save_state, wait_for_everyone). Make it on all ranks: not under "
                    "`if trainer.is_global_zero:` or `if accelerator.is_main_process:`, and without leaving one rank's script "
                    "early."
                )

    def _refuse_passed(self, rank: int, key: str, call: str, own: RankPosition) -> None:
        """Raise if the rank that is waited for has reported a position beyond this call; request its position again."""
        if self._positions is None:
            return
        other = self._positions.reported(self._store, rank)
        # A rank posts a call before it moves on, so a call that is still missing was skipped, or comes out of order.
        if other is not None and other.order > own.order and not self._store.check([key]):
            if not own.text and not other.text:  # in a raw loop, whose order is the number of its collectives
                raise CallSkipped(
                    f"rank {self.rank} makes a call in which rank {rank} is missing: {call}. Rank {rank} is elsewhere: it has "
                    "made a further collective call, such as the averaging of gradients in a backward. "
                    f"{ON_ALL_RANKS} Leave a loop on all ranks at the same batch."
                )
            raise CallSkipped(
                f"rank {self.rank} makes a call that rank {rank} has skipped: {call}{_at(own.text)}. Rank {rank} is already "
                f"past it{_at(other.text)}. {ON_ALL_RANKS}"
            )
        self._positions.request(self._store, rank)


def _different_calls(calls: list[tuple[str, str]]) -> str:
    here, at_here = calls[0]
    rank, (there, at_there) = next((rank, other) for rank, other in enumerate(calls) if other[0] != here)
    return (
        f"the ranks have met in different calls: rank 0 in {here}{_at(at_here)}, rank {rank} in {there}{_at(at_there)}. "
        f"{ON_ALL_RANKS}"
    )


def _at(text: str) -> str:
    return f" ({text})" if text else ""
