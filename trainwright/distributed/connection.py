"""Connection: one process's connection to its job: the process group, the store's channel and the watcher thread."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainwright.devices.abilities import collective_backend
from trainwright.distributed.collectives import group_backends, use_data_group
from trainwright.distributed.environment import Environment, choose_interface
from trainwright.distributed.failures import FailureLog, PeerWatch
from trainwright.distributed.job_store import STORE_PREFIX, Store, open_store, stores
from trainwright.distributed.store_channel import RankPositions, StoreChannel
from trainwright.distributed.sync_points import SyncPoint, SyncPoints

FAILED_GROUP_SECONDS = 1.0  # for the process group's threads to end after a failure


def pick_backend(device_type: str, *, on_host_too: bool = False) -> str:
    """Return the collective backend of a device type (ValueError if none). `on_host_too` adds gloo for host tensors."""
    backend = collective_backend(device_type)
    if backend is None:
        raise ValueError(
            f"torch {torch.__version__} has no process group for {device_type!r}, so neither several processes nor strategies "
            "that need a process group can compute on it; pass devices=1 with strategy='auto', or accelerator='cpu'."
        )
    return f"cpu:gloo,{device_type}:{backend}" if on_host_too and device_type != "cpu" else backend


def make_mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """Return the mesh of all ranks with these dimensions, of which the last has neighbouring ranks.

    Raises:
        ValueError: over gloo on an accelerator, where torch's DTensor crashes when it gathers.
    """
    backend = collective_backend(device_type)
    if group_backends().get(device_type) == "gloo" != backend:
        raise ValueError(
            f"fsdp does not run over gloo on {device_type!r}: torch's DTensor crashes there when it gathers. Open the process "
            f"group with {backend!r}, or choose strategy='ddp'."
        )
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@dataclass
class Connection:
    """This process's connection to its job: the process group, the store and a channel over it."""

    environment: Environment
    backend: str | None
    channel: StoreChannel | None
    """None in a job of one process."""
    store: Store | None = None
    owns_group: bool = False
    """False if the user's script opened the group, which it then also closes."""
    polls: dict[str, Callable[[Store], None]] = field(default_factory=dict)
    _sync_points: SyncPoints = field(default_factory=lambda: SyncPoints(None, 0, 1), repr=False)
    _watch: PeerWatch | None = field(default=None, repr=False)
    _holders: list[weakref.WeakMethod[Callable[[], None]]] = field(default_factory=list, repr=False)
    _pid: int = field(default_factory=os.getpid, repr=False)
    _is_closed: bool = field(default=False, repr=False)

    def sync_point(self, name: str) -> SyncPoint:
        """Return a new sync point of all ranks, for one run of the loop. See `SyncPoints.make`."""
        return self._sync_points.make(name)

    @property
    def has_failed(self) -> bool:
        """Return whether an error of this process was posted, so that the other ranks leave."""
        return self._watch is not None and self._watch.has_failed

    def announce_stop(self, code: int) -> None:
        """See `FailureLog.announce_stop`."""
        if self.store is not None:
            FailureLog(self.store).announce_stop(code)

    def before_close(self, release: Callable[[], None]) -> None:
        """Call a bound method before the group closes, to release it. A group in use at exit may abort the process."""
        self._holders.append(weakref.WeakMethod(release))

    def close(self) -> None:
        """Stop watching the peers and close the process group, if it was opened here. Safe to call twice."""
        global _connection
        if self._is_closed or os.getpid() != self._pid:  # a forked child inherits the object, not the group
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if _connection is self:
            _connection = None
        if self._watch is None or self.channel is None:
            return
        atexit.unregister(self._watch.stop)
        if self.owns_group and not self._watch.has_failed and not self._watch.has_said_goodbye:
            with suppress(RuntimeError, OSError):  # the store's host may be dead
                self.channel.leave()  # before the goodbye, which the host waits for
        self._watch.stop()
        if self.owns_group and not self._watch.has_failed:
            self._destroy_group()
        elif self.owns_group and self.backend == "gloo":
            _clear_last_error()
            # The process aborts if a thread of gloo releases a tensor while the interpreter ends. In a collective whose peer is
            # gone, a thread takes longer.
            destroyer = threading.Thread(target=self._destroy_group, name="trainwright-destroy-group", daemon=True)
            with suppress(RuntimeError):  # Python 3.12.0 and 3.12.1 start no thread that late
                destroyer.start()
                destroyer.join(FAILED_GROUP_SECONDS)

    def _destroy_group(self) -> None:
        for holder in self._holders:
            if (release := holder()) is not None:
                release()
        use_data_group(None)
        gc.collect()  # a DistributedDataParallel is a cycle
        _destroy_group()


def _clear_last_error() -> None:
    """Clear the frames of the error that ends this process, in which collectives refer to their group."""
    error: BaseException | None = getattr(sys, "last_value", None)
    cleared = set()
    while error is not None and id(error) not in cleared:
        cleared.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def open_connection() -> Connection | None:
    """Return this process's open connection to a job of several ranks, or None if it has not opened one."""
    return _connection


_connection: Connection | None = None
_generation = 0  # how often this process opened a group, equal on all ranks because opening is collective


def open_process_group(
    environment: Environment,
    backend: str,
    timeout_seconds: float = 1800.0,
    *,
    needs_group: bool = False,
    device_types: Sequence[str] = (),
) -> Connection:
    """Open this process's connection to its job, or return the one already open. Collective: call on every rank.

    A group that the script opened is joined, and stays open at the end. A single process opens nothing, unless it
    `needs_group`. `device_types` are the types of devices whose tensors are sent, first the one that this process computes on.

    Raises:
        RuntimeError: a group of another job is open, or the group has no backend for one of the `device_types`.
    """
    global _connection, _generation
    if environment.world_size == 1:
        if needs_group:
            choose_interface(environment)
            if not dist.is_initialized():
                dist.init_process_group(backend, store=stores().HashStore(), rank=0, world_size=1)
                atexit.register(_destroy_group)
            _check_backends(device_types[:1])  # one process sends nothing from other devices
        return Connection(environment, None, None)
    if _connection is not None:
        if _connection.environment != environment:
            raise RuntimeError(
                f"a process group is already open for {_connection.environment}, not for {environment}; "
                "a process belongs to one job. Close the first connection before opening another."
            )
        _check_backends(device_types)
        return _connection

    import torch.distributed.nn.functional  # noqa: F401 - imported later, its functions' defaults would refer to the group

    timeout = timedelta(seconds=timeout_seconds)
    is_joined = dist.is_initialized()
    if is_joined:
        _check_joined_group(environment)
        _check_backends(device_types)
    base, store_host = open_store(environment, timeout, is_joined)
    job = stores().PrefixStore(f"{STORE_PREFIX}/{environment.restart_count}", base)
    # NOTE: a blocking call of one thread occupies its connection, so the group, the channel and the watch have separate ones.
    control = job.clone()
    shared = stores().PrefixStore(f"generation/{_generation}", control)
    positions = RankPositions(environment.rank)
    FailureLog(control).announce_join(environment.rank)
    polls: dict[str, Callable[[Store], None]] = {}
    watch, sync_points = _start_watch(environment, backend, shared, job.clone(), store_host, positions, polls)
    atexit.register(watch.stop)
    plain_hook = sys.excepthook
    try:
        if not is_joined:
            choose_interface(environment)
            dist.init_process_group(
                backend,
                store=stores().PrefixStore(f"group/{_generation}", job),
                rank=environment.rank,
                world_size=environment.world_size,
                timeout=timeout,
            )
    finally:
        # torch's hook puts the rank before each line of a traceback. Our launcher does that for all output.
        if environment.launched_by == "trainwright":
            sys.excepthook = plain_hook
        watch.wrap_excepthook()
    channel = StoreChannel(shared, environment.rank, environment.world_size, positions=positions)
    _generation += 1
    opened = channel, control, not is_joined, polls, sync_points, watch
    _connection = Connection(environment, dist.get_backend(), *opened)
    atexit.register(_connection.close)
    return _connection


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _start_watch(
    environment: Environment,
    backend: str,
    shared: Store,
    watched: Store,
    store_host: int | None,
    positions: RankPositions,
    polls: dict[str, Callable[[Store], None]],
) -> tuple[PeerWatch, SyncPoints]:
    """Start the watcher thread, and return it with the sync points that it polls."""
    place, synchronize = (environment.rank, environment.world_size), torch.accelerator.synchronize
    sync_points = SyncPoints(shared, *place, synchronize=None if backend == "gloo" else synchronize)
    watched_shared = stores().PrefixStore(f"generation/{_generation}", watched)

    def poll() -> None:
        sync_points.poll(watched_shared)
        positions.answer(watched_shared)
        for watch_more in list(polls.values()):
            watch_more(watched)

    watch = PeerWatch(
        watched,
        *place,
        name=str(_generation),
        store_host=store_host,
        error_file=environment.error_file if environment.launched_by == "torchrun" else None,
        poll=poll,
    )
    watch.start()
    return watch, sync_points


def _check_joined_group(environment: Environment) -> None:
    found = (dist.get_rank(), dist.get_world_size())
    if found != (environment.rank, environment.world_size):
        raise RuntimeError(
            f"torch.distributed is initialised as rank {found[0]} of {found[1]}, but the environment says "
            f"rank {environment.rank} of {environment.world_size}; both must agree. Do not call init_process_group yourself."
        )


def _check_backends(device_types: Sequence[str]) -> None:
    served = group_backends()
    if missing := [device_type for device_type in device_types if device_type not in served]:
        wanted = ",".join(f"{device_type}:{pick_backend(device_type)}" for device_type in device_types)
        raise RuntimeError(
            f"the process group of this process was opened with {dist.get_backend_config()!r}, which has no backend for "
            f"{missing[0]!r}; this run needs {wanted!r}. Run it in another process, or before the run that opened the group."
        )
