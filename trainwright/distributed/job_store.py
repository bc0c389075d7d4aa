"""The key-value store of a job: torch's interface, the process that hosts it, and posts to other ranks."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

from trainwright.distributed.network import LOOPBACK, is_listening, listen_at
from trainwright.errors import LaunchError

if TYPE_CHECKING:
    from trainwright.distributed.environment import Environment

STORE_PREFIX = "trainwright"
"""The prefix of all our keys in the job's store. The number of the restart follows."""

ANSWER_SECONDS = 30.0  # for a store that listens to answer: the launcher may still be importing torch
_hosted_store: Store | None = None  # alive until the process ends, because other ranks may still read it


class Store(Protocol):
    """The part of torch's key-value stores that is used here."""

    def set(self, key: str, value: bytes | str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...
    def clone(self) -> Store: ...


def post(store: Store, key: str, value: bytes | str) -> None:
    """Set a key and return once the store has it, so that other ranks find it from then on.

    `set` returns while the request is on its way: torch's TCPStore does not answer it, and may serve another connection
    first. It serves the requests of one connection in order, so the answer to the next request is the receipt.
    """
    store.set(key, value)
    store.check([key])


def open_store(environment: Environment, timeout: timedelta, is_joined: bool) -> tuple[Store, int | None]:
    """Connect to the job's store. Return it with the rank that hosts it, or None if the launcher does."""
    global _hosted_store
    limit = min(timeout, timedelta(seconds=300))
    if is_joined and not environment.has_agent_store:
        return cast(Store, stores().group.WORLD.get_group_store()), 0
    address, port = environment.main_address, environment.main_port
    assert address is not None
    assert port is not None
    if environment.has_agent_store:
        return join_store(address, port, limit), None
    if environment.rank != 0:
        store = join_store(LOOPBACK if environment.num_nodes == 1 else address, port, limit)
        if (job := store.get("job").decode()) != environment.job:
            raise LaunchError(
                f"rank 0 of the job {job!r} answers at {address} port {port}, and this is rank {environment.rank} of "
                f"{environment.job!r}. Set another port for one of them (MASTER_PORT)."
            )
        return store, 0
    if _hosted_store is None:
        _hosted_store = _host_store(address, port, limit, environment.num_nodes)
        post(_hosted_store, "job", environment.job)
    return _hosted_store, 0


def stores() -> Any:
    # Type checkers do not see how torch exports its stores.
    import torch.distributed as dist

    return dist


def join_store(address: str, port: int, timeout: timedelta) -> Store:
    """Connect to a job's store. Python's signal handlers run meanwhile.

    Raises:
        LaunchError: nothing listens there in time, or another program does.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while not is_listening(address, port):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"no store of this job answers at {address} port {port}; rank 0 has to listen there. Check whether rank 0 has "
                "started or failed, whether a firewall is in between, and whether another program uses the port (MASTER_PORT)."
            )
        time.sleep(0.1)
    found: list[Store] = []

    def connect() -> None:
        with suppress(RuntimeError):
            found.append(stores().TCPStore(address, port, None, False, timeout=timeout, wait_for_workers=False))

    # In a thread, because torch's client blocks signal handlers, and waits for another program's answer without a limit.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if not found:
        raise LaunchError(
            f"a program that is no store of a job answers at {address} port {port}. Use another port for the job, the same on "
            "all nodes (--main-port of trainwright launch, or MASTER_PORT)."
        )
    return found[0]


def serve_store(listener: socket.socket, address: str, timeout: timedelta = timedelta(seconds=300)) -> Store:
    """Serve a job's store at a listening socket. Torch's store would listen on all interfaces without one."""
    port = int(listener.getsockname()[1])
    options = {"timeout": timeout, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return cast(Store, stores().TCPStore(address, port, None, True, **options))


def _host_store(address: str, port: int, timeout: timedelta, num_nodes: int) -> Store:
    """Host the job's store in this process. It listens only on the loopback interface if the job has one node."""
    host = LOOPBACK if num_nodes == 1 else address
    return serve_store(listen_at(host, port, else_everywhere=num_nodes > 1), host, timeout)
