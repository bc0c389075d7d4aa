"""Ranks: agreement of a job's ranks on small values over the key-value store, without a collective."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.distributed.job_store import stores
from trainwright.distributed.store_channel import StoreChannel
from trainwright.errors import CheckpointError, MissingCheckpoint

KINDS = (MissingCheckpoint, CheckpointError, ValueError)
"""Errors of one rank that all ranks raise, the most specific first."""


class Ranks:
    """Exchanges values of JSON types between ranks. Methods are collective (call them on every rank) unless they say otherwise.

    `call` names the step that a value belongs to. Ranks that meet in different calls all raise.
    """

    def __init__(self, channel: StoreChannel | None = None, timeout_seconds: float = 1800.0) -> None:
        self._channel = channel or _channel_of_one()
        self.timeout_seconds = timeout_seconds
        self.rank, self.world_size = self._channel.rank, self._channel.world_size

    def subchannel(self, name: str) -> Ranks:
        """Return ranks for a second thread, whose calls pair up separately. See `StoreChannel.subchannel`."""
        return Ranks(self._channel.subchannel(name), self.timeout_seconds)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Treat this rank as the only rank within the block: the others may be gone, or wait elsewhere. Not collective."""
        shared = self._channel, self.rank, self.world_size
        self._channel, self.rank, self.world_size = _channel_of_one(), 0, 1
        try:
            yield
        finally:
            self._channel, self.rank, self.world_size = shared

    def give_up(self) -> None:
        """Make a call that waits in another thread raise, and every later call. Not collective."""
        self._channel.give_up()

    def exchange(self, value: Any, call: str) -> list[Any]:
        """Return the values of all ranks, by rank."""
        replies = self._exchange(json.dumps(value).encode(), call)
        return list(json.loads(b"[" + b",".join(replies) + b"]"))

    def wait(self, call: str) -> None:
        """Wait until every rank has made this call."""
        self._exchange(b"", call)

    def broadcast(self, value: Any, call: str) -> Any:
        """Return rank 0's value."""
        return json.loads(self._exchange(json.dumps(value).encode() if self.rank == 0 else b"", call)[0])

    def differing(self, value: Any, call: str) -> list[Any]:
        """Return the values of all ranks if they differ, or an empty list. Large values are sent only if they differ."""
        digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()
        return self.exchange(value, call) if len(set(self.exchange(digest, call))) > 1 else []

    def decide(self, decide: Callable[[], Any], call: str) -> Any:
        """Return the result of `decide` on every rank. Only rank 0 calls it: metrics, clocks and files may differ by rank.

        Rank 0's ValueError or CheckpointError is raised on every rank. Any other error ends the job, like a failed rank.
        """
        reply: dict[str, Any] = {}
        if self.rank == 0:
            try:
                reply = {"value": decide()}
            except KINDS as error:
                reply = {"error": str(error), "kind": [isinstance(error, each) for each in KINDS].index(True)}
        reply = self.broadcast(reply, call)
        if "error" in reply:
            raise KINDS[reply["kind"]](reply["error"])
        return reply["value"]

    def run_on_all(
        self,
        work: Callable[[], Any] | None,
        call: str,
        *,
        subject: str = "",
        describe: Callable[[Exception], str] | None = None,
        only_first: bool = False,
    ) -> list[Any]:
        """Do this rank's part of a save or a load and return the results of all ranks; a failure of one rank is raised on all.

        Args:
            work: this rank's part, or None if it has none.
            subject: the failure in words, for the error ("checkpoint x was not written").
            only_first: only rank 0 needs the results, and the others get None for each. The same on all ranks.

        Raises:
            CheckpointError: the work failed on some rank, with the same text on all.
        """
        cause: Exception | None = None
        result = b""
        try:
            payload, result = b"+", _pack(work() if work else None)
        except Exception as error:
            # Posted instead of raised, because the other ranks wait for this rank's payload.
            cause = error
            payload = b"-" + (describe or _describe)(error).encode(errors="backslashreplace")
        replies = self._exchange(payload, call, result) if only_first else self._exchange(payload + result, call)
        if failures := {rank: reply[1:].decode() for rank, reply in enumerate(replies) if reply[:1] == b"-"}:
            text = _joined(failures, len(replies))
            kind = MissingCheckpoint if isinstance(cause, MissingCheckpoint) else CheckpointError
            raise kind(f"{subject}: {text}" if subject else text) from cause
        return [json.loads(zlib.decompress(reply[1:])) if len(reply) > 1 else None for reply in replies]

    def posted(self, value: Any) -> list[Any]:
        """Post a value. Return the values that ranks have posted on this subchannel, or None for others. Not collective."""
        replies = self._channel.posted(json.dumps(value).encode())
        return [None if reply is None else json.loads(reply) for reply in replies]

    @contextmanager
    def first(self, is_first: bool) -> Iterator[None]:
        """Run the block on the ranks with `is_first` before the others begin it."""
        call = "rank_zero_first or main_process_first"
        if not is_first:
            self.wait(call)
        try:
            yield
        finally:
            if is_first:
                self.wait(call)

    def _exchange(self, payload: bytes, call: str, for_first: bytes | None = None) -> list[bytes]:
        return self._channel.exchange(payload, call=call, timeout_seconds=self.timeout_seconds, for_first=for_first)


def _channel_of_one() -> StoreChannel:
    return StoreChannel(stores().HashStore(), 0, 1)


def _describe(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _joined(failures: dict[int, str], world_size: int) -> str:
    (rank, text), *others = failures.items()
    if world_size == 1 or (len(failures) == world_size and len(set(failures.values())) == 1):
        return text
    more = f" (ranks {', '.join(str(other) for other, _ in others)} failed too)" if others else ""
    return f"rank {rank}: {text}{more}"


def _pack(result: Any) -> bytes:
    if result is None:  # of most ranks, and every rank reads the results of all
        return b""
    # A table of many tensors is megabytes of JSON, of which the store takes 8 MiB per value. Packing saves a factor of 5 to 10.
    return zlib.compress(json.dumps(result, separators=(",", ":")).encode(), 1)
