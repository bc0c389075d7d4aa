"""How the ranks of a save or a load agree: each does its part, all learn every outcome, all raise the same error."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from trainwright.checkpoint.filesystem import describe
from trainwright.errors import CheckpointError


class Exchange(Protocol):
    """Posts a payload to all ranks and returns every rank's, by rank. Collective: call on every rank."""

    def exchange(self, payload: bytes, *, call: str, timeout_seconds: float) -> list[bytes]:
        """Return the payloads of all ranks; with one rank, the one given."""


class Outcomes:
    """The exchanges of one save or load.

    Args:
        exchange: what carries the payloads between the ranks.
        call: what it is that the ranks do together; each says the same.
        subject: what fails if a rank fails, as the error says it ("checkpoint x was not written"); empty where the errors
            of the ranks say so themselves.
        path: where, for the report of a full disk.
        timeout_seconds: how long to wait for the slowest rank.
    """

    def __init__(self, exchange: Exchange, call: str, subject: str, path: str, timeout_seconds: float) -> None:
        self._exchange, self._call = exchange, call
        self._subject = subject
        self._path = path
        self._timeout_seconds = timeout_seconds

    def settle(self, work: Callable[[], Any] | None, *, reads: bool = True) -> list[Any]:
        """Do this rank's part and return the (JSON-able) results of all. Collective: call on every rank.

        A rank that does not read the results gets None for each: to unpack large ones holds its other threads up.

        Raises:
            CheckpointError: the work failed on some rank; the text is the same on all.
        """
        cause: Exception | None = None
        try:
            payload = b"+" + _pack(work() if work else None)
        except Exception as error:
            cause = error
            payload = b"-" + _explain(error, self._path).encode(errors="backslashreplace")
        replies = self._exchange.exchange(payload, call=self._call, timeout_seconds=self._timeout_seconds)
        failures = [(rank, reply[1:].decode()) for rank, reply in enumerate(replies) if reply[:1] == b"-"]
        if failures:
            rank, text = failures[0]
            who = f"rank {rank}: " if len(replies) > 1 else ""
            others = f" (ranks {', '.join(str(other) for other, _ in failures[1:])} failed too)" if failures[1:] else ""
            if len(failures) == len(replies) and len({text for _, text in failures}) == 1:
                who = others = ""  # they say the same
            subject = f"{self._subject}: " if self._subject else ""
            raise CheckpointError(f"{subject}{who}{text}{others}") from cause
        return [json.loads(zlib.decompress(reply[1:])) if reads else None for reply in replies]


def _explain(error: Exception, path: str) -> str:
    return str(error) if isinstance(error, CheckpointError) else describe(error, path)


def _pack(result: Any) -> bytes:
    # A table of many tensors is megabytes of JSON, the key-value store takes 8 MiB a value; it packs 5 to 10 times.
    return zlib.compress(json.dumps(result, separators=(",", ":")).encode(), 1)
