"""Store channel: exchanges small payloads between all ranks over the key-value store, without a collective.

A rank that waits in a call also finds out that another rank has moved past the call. After a while it requests the position of
the rank that it waits for. That rank's watcher thread answers, because its main thread may be blocked in a collective that
waits for the first rank in turn. Otherwise nothing is sent.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from typing import NamedTuple

from trainwright.distributed.job_store import Store, post

ON_ALL_RANKS = (
    "Make such calls on all ranks, in the same order: not under `if trainer.is_global_zero:` or "
    "`if accelerator.is_main_process:`, nor in one rank's hook."
)

SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02
PAUSED_PART = 1 / 32
"""The pause of a waiting rank as a part of the time that it has waited, within the two limits."""
MOST_POLLS = 20_000
"""The requests per second of all waiting ranks together. A TCPStore answers 100,000, of one rank after the other."""
LARGEST_VALUE = 4 << 20
"""The most bytes of a value; a TCPStore accepts 8 MiB."""
LOOK_SECONDS = 0.5
"""How often a waiting rank checks whether the others have left or moved past the call."""


Locate = Callable[[], tuple[tuple[int, ...], str]]
"""Returns counters that only grow in a run, equal on all ranks at the same point, and the point in words."""


class RankPosition(NamedTuple):
    """Where a rank is in the sequence that all ranks go through."""

    order: tuple[int, ...]
    """Of two ranks, the rank with the larger order is further on."""
    text: str
    """The position in words, or empty if unknown."""


class RankPositions:
    """Reports this rank's position and requests the positions of others. Thread-safe."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._runs = 0
        self._locate: Locate | None = None
        self._lock = threading.Lock()
        self._answered = 0

    def locate_by(self, locate: Locate) -> None:
        """Take positions from a loop whose end is unknown, from now on. Call it on every rank."""
        with self._lock:
            self._runs, self._locate = self._runs + 1, locate

    @contextmanager
    def located_by(self, locate: Locate) -> Iterator[None]:
        """Take positions from a run during the block. Enter it on every rank. An inner run replaces the outer one."""
        outer = self._locate
        # Counted on entering and on leaving: a rank that has left a run is further on than a rank within it.
        self.locate_by(locate)
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
        """Post this rank's position if it was requested since the last answer. The watcher calls this."""
        requested = store.add(f"position/{self._rank}/requested", 0)
        if requested == self._answered:
            return
        # `locate` reads counters that the main thread changes meanwhile. If that fails, the next request is answered.
        with suppress(Exception):
            store.set(f"position/{self._rank}", json.dumps(self.now()))
            self._answered = requested

    def ask(self, store: Store, rank: int) -> RankPosition | None:
        """Return the latest position that another rank has reported, or None, and request a later one."""
        store.add(f"position/{rank}/requested", 1)
        if not store.check([f"position/{rank}"]):
            return None
        order, text = json.loads(store.get(f"position/{rank}"))
        return RankPosition(tuple(order), text)


class CallSkipped(RuntimeError):
    """Another rank has moved past the call that this rank waits in."""


class StoreChannel:
    """Exchanges payloads between all ranks in the order of their calls.

    Only the main thread's channel is made with `positions`, and asks for the positions of others. In a job of more than
    `group_size` ranks the first rank of a group collects its posts, and rank 0 collects the posts of the groups. No other
    rank reads all posts.
    """

    group_size = 32

    def __init__(
        self, store: Store, rank: int, world_size: int, *, name: str = "main", positions: RankPositions | None = None
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._name = store, name
        self._asks = positions is not None
        self.positions = positions or RankPositions(rank)
        self._lock = threading.Lock()
        self._calls = 0
        self._keys, self._previous_keys = list[str](), list[str]()
        """The keys that this rank has set in the current call and in the previous one."""
        self._subchannels: Counter[str] = Counter()
        self._given_up = threading.Event()

    def subchannel(self, name: str) -> StoreChannel:
        """Return a channel for a second thread. Make channels of one name in the same order on every rank. Nothing is sent."""
        self._subchannels[name] += 1
        path = f"{self._name}/{name}/{self._subchannels[name]}"
        return StoreChannel(self._store, self.rank, self.world_size, name=path)

    def give_up(self) -> None:
        """Make a call that waits in another thread, and every later call that would wait, raise RuntimeError."""
        self._given_up.set()

    def exchange(
        self, payload: bytes, *, call: str, timeout_seconds: float, for_first: bytes | None = None
    ) -> list[bytes]:
        """Post this rank's payload and return the payloads of all ranks, by rank. Call on every rank, in the same order.

        Args:
            call: names the call, with its step if it has one. It must be the same on all ranks.
            for_first: a second part of the payload, which only rank 0 reads, or None on all ranks.

        Raises:
            RuntimeError: the ranks have met in different calls, or another rank has skipped this call or has exited.
            TimeoutError: a rank has not made the call in time.
        """
        if self.world_size == 1:
            return [payload + (for_first or b"")]
        own = self.positions.now()
        header = json.dumps([call, own.text]).encode()
        with self._lock:  # if calls of two threads overlapped, the deletion below would be too early
            number = self._calls
            self._calls += 1
            if for_first is not None:
                self._set(self._key(number, f"{self.rank}/first"), for_first)
            self._set(self._key(number, self.rank), header + b"\n" + payload)
            wait = partial(self._wait, number, call=call, own=own, timeout_seconds=timeout_seconds)
            posts = (
                self._gather_by_groups(number, wait)
                if self.world_size > self.group_size
                else self._gather(number, wait)
            )
            parts = [post.split(b"\n", 1) for post in posts]
            if for_first is not None and self.rank == 0:
                seconds = self._get_all([self._key(number, f"{rank}/first") for rank in range(self.world_size)])
                parts = [[head, body + second] for (head, body), second in zip(parts, seconds, strict=True)]
            # Every rank has posted this call, so every rank has read the previous one.
            for key in self._previous_keys:
                self._store.delete_key(key)
            self._previous_keys, self._keys = self._keys, []
        heads = [head for head, _ in parts]
        here, at_here = json.loads(heads[0])
        for head in dict.fromkeys(heads):  # usually one, and reading a thousand takes milliseconds on every rank
            there, at_there = json.loads(head)
            if there != here:
                rank = heads.index(head)
                raise RuntimeError(
                    f"the ranks have met in different calls: rank 0 in {here}{_at(at_here)}, rank {rank} in "
                    f"{there}{_at(at_there)}. {ON_ALL_RANKS}"
                )
        return [body for _, body in parts]

    def _gather(self, number: int, wait: Callable[[dict[str, int], int], None]) -> list[bytes]:
        """Return the posts of all ranks in a call."""
        keys = {self._key(number, rank): rank for rank in range(self.world_size)}
        wait(keys, self.world_size)  # for this rank's key too, which is the store's receipt
        return self._get_all(keys)

    def _gather_by_groups(self, number: int, wait: Callable[[dict[str, int], int], None]) -> list[bytes]:
        """Return the posts of all ranks, which the first rank of each group and then rank 0 collect."""
        first = self.rank - self.rank % self.group_size
        if self.rank == first:
            members = range(first, min(first + self.group_size, self.world_size))
            keys = {self._key(number, rank): rank for rank in members}
            wait(keys, self.world_size // self.group_size)
            self._set_list(self._key(number, f"group/{first}"), self._get_all(keys))
        whole = self._key(number, "whole")
        if self.rank == 0:
            groups = {self._key(number, f"group/{rank}"): rank for rank in range(0, self.world_size, self.group_size)}
            wait(groups, 1)
            lists = zip(groups, self._get_all(groups), strict=True)
            self._set_list(whole, [post for key, text in lists for post in self._posts(key, text)])
        wait({whole: 0}, self.world_size)
        return self._posts(whole, self._store.get(whole))

    def _set_list(self, key: str, posts: list[bytes]) -> None:
        """Store a list of posts under a key. A long list takes several values, because a value has at most 8 MiB."""
        sizes = json.dumps([len(post) for post in posts]).encode()
        text = zlib.compress(sizes + b"\n" + b"".join(posts), 1)
        parts = [text[start : start + LARGEST_VALUE] for start in range(0, len(text), LARGEST_VALUE)]
        for number, part in enumerate(parts[1:], start=1):
            self._set(f"{key}/{number}", part)
        self._set(key, b"%d\n" % len(parts) + parts[0])

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)
        self._keys.append(key)

    def _get_all(self, keys: Iterable[str]) -> list[bytes]:
        """Return the values of existing keys, in few requests."""
        keys, count = list(keys), 32  # not all at once, because values may have megabytes
        groups = (keys[start : start + count] for start in range(0, len(keys), count))
        return [bytes(value) for group in groups for value in self._store.multi_get(group)]

    def _posts(self, key: str, value: bytes) -> list[bytes]:
        """Return the list that is stored under a key and begins with this value."""
        count, text = bytes(value).split(b"\n", 1)
        text += b"".join(bytes(self._store.get(f"{key}/{number}")) for number in range(1, int(count)))
        sizes, content = zlib.decompress(text).split(b"\n", 1)
        stream = BytesIO(content)
        return [stream.read(size) for size in json.loads(sizes)]

    def posted(self, payload: bytes) -> list[bytes | None]:
        """Post this rank's payload, and return all payloads posted so far, by rank. The last rank sees all."""
        keys = [f"posted/{self._name}/{rank}" for rank in range(self.world_size)]
        post(self._store, keys[self.rank], payload)
        return [bytes(self._store.get(key)) if self._store.check([key]) else None for key in keys]

    def leave(self) -> None:
        """Record that this rank makes no more calls."""
        post(self._store, f"left/{self.rank}", b"")

    def _key(self, call: int, name: int | str) -> str:
        return f"exchange/{self._name}/{call}/{name}"

    def _wait(
        self,
        number: int,
        keys: dict[str, int],
        waiting: int,
        *,
        call: str,
        own: RankPosition,
        timeout_seconds: float,
    ) -> None:
        """Wait until all keys exist. `keys` maps each key to the rank that sets it. `waiting` ranks wait at the same time."""
        # Polls, because a blocking wait would keep the connection from other threads and delay signal handlers.
        began = looked = time.monotonic()
        deadline = began + timeout_seconds
        missing = [] if self._store.check(list(keys)) else list(reversed(keys))
        while missing:
            # One key at a time, because checks of a thousand keys would keep the store busy.
            if self._store.check(missing[-1:]):
                missing.pop()
                continue
            if self._given_up.is_set():
                raise RuntimeError("this rank no longer waits for the others: its run has ended, or theirs have.")
            now = time.monotonic()
            if now > deadline:
                ranks = range(self.world_size)
                absent = [rank for rank in ranks if not self._store.check([self._key(number, rank)])]
                raise TimeoutError(
                    f"rank {self.rank} waited {timeout_seconds:g} s in {call} for rank(s) {absent} of {self.world_size}; "
                    "every rank must make this call. Find out what these ranks are doing, or allow more time."
                )
            if now > looked + LOOK_SECONDS:
                looked = now
                # Rank 0 awaits the posts of all ranks, directly or by groups.
                everyone = (
                    {self._key(number, rank): rank for rank in range(self.world_size)} if self.rank == 0 else keys
                )
                self._refuse_left(everyone)
                self._refuse_passed(keys[missing[-1]], missing[-1], call, own)
            pause = min(max((now - began) * PAUSED_PART, SHORTEST_PAUSE), LONGEST_PAUSE)
            time.sleep(max(pause, waiting / MOST_POLLS))

    def _refuse_left(self, keys: dict[str, int]) -> None:
        for key, rank in keys.items():
            # The key is checked again, because the rank may have posted it and left between the first two checks.
            if not self._store.check([key]) and self._store.check([f"left/{rank}"]) and not self._store.check([key]):
                raise RuntimeError(
                    f"rank {rank} has exited while rank {self.rank} waits for it in a call that every rank has to make (fit, "
                    "validate, test, predict, save_checkpoint, save_state, wait_for_everyone). Make it on all ranks: not under "
                    "`if trainer.is_global_zero:` or `if accelerator.is_main_process:`, and without leaving one rank's script "
                    "early."
                )

    def _refuse_passed(self, rank: int, key: str, call: str, own: RankPosition) -> None:
        """Raise CallSkipped if an awaited rank has reported a position beyond this call."""
        other = self.positions.ask(self._store, rank) if self._asks else None
        # A rank posts a call before it moves on, so a missing call was skipped, or comes out of order.
        if other is not None and other.order > own.order and not self._store.check([key]):
            if not own.text and not other.text:  # in a raw loop, whose order is the number of its collectives
                raise CallSkipped(
                    f"rank {self.rank} makes a call in which rank {rank} is missing: {call}. Rank {rank} is elsewhere: it has "
                    "made another collective call, such as the averaging of gradients in a backward. "
                    f"{ON_ALL_RANKS} Leave a loop on all ranks at the same batch."
                )
            raise CallSkipped(
                f"rank {self.rank} makes a call that rank {rank} has skipped: {call}{_at(own.text)}. Rank {rank} is already "
                f"past it{_at(other.text)}. {ON_ALL_RANKS}"
            )


def _at(text: str) -> str:
    return f" ({text})" if text else ""
