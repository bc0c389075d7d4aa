"""The key-value store of a job: torch's interface, the process that hosts it, and posts to other ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

from trainwright.distributed.network import LOOPBACK, listen_at
from trainwright.errors import LaunchError

if TYPE_CHECKING:
    from trainwright.distributed.environment import Environment

STORE_PREFIX = "trainwright"
"""The prefix of all our keys in the job's store. The number of the restart follows."""

_hosted_store: Store | None = None  # alive until the process ends, because other ranks may still read it


class Store(Protocol):
    """The part of torch's key-value stores that is used here."""

    def set(self, key: str, value: bytes | str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
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
        return _join_store(address, port, limit), None
    if environment.rank != 0:
        return _join_store(LOOPBACK if environment.num_nodes == 1 else address, port, limit), 0
    if _hosted_store is None:
        _hosted_store = _host_store(address, port, limit, environment.num_nodes)
    return _hosted_store, 0


def stores() -> Any:
    # Type checkers do not see how torch exports its stores.
    import torch.distributed as dist

    return dist


def _join_store(address: str, port: int, timeout: timedelta) -> Store:
    import torch.distributed as dist

    try:
        return cast(Store, stores().TCPStore(address, port, None, False, timeout=timeout, wait_for_workers=False))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise LaunchError(
            f"no store of this job answers at {address} port {port}; rank 0 has to listen there. Check whether rank 0 has "
            "started or failed, whether a firewall is in between, and whether another program uses the port (MASTER_PORT)."
        ) from error


def _host_store(address: str, port: int, timeout: timedelta, num_nodes: int) -> Store:
    """Host the job's store in this process. It listens only on the loopback interface if the job has one node."""
    host = LOOPBACK if num_nodes == 1 else address
    listener = listen_at(host, port, else_everywhere=num_nodes > 1)
    options = {"timeout": timeout, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return cast(Store, stores().TCPStore(host, port, None, True, **options))
