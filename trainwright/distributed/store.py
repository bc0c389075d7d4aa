"""The key-value store of a job: what is used here of torch's, and how something is posted in it for other ranks."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """What is used here of torch's key-value stores."""

    def set(self, key: str, value: bytes | str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...
    def clone(self) -> Store: ...


def post(store: Store, key: str, value: bytes | str) -> None:
    """Set a key and return once the store has it, so that every rank which is told of it afterwards finds it.

    `set` alone returns when the request is on its way: torch's TCPStore answers no `set`, and another connection may be
    served before it. Requests of one connection are served in their order, so the answer to the next one is the receipt.
    """
    store.set(key, value)
    store.check([key])
