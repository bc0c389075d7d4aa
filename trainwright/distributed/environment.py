"""Which process of which job this is, and the one owner of the process group.

This is the only reader of the environment outside `launch/`; what SLURM's and MPI's variables mean stands in `clusters.py`.
Starting processes is left to `launch/`, what is sent over the group to `collectives.py`, and agreement over the store to
`ranks.py`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from trainwright.distributed.appointments import Appointment, AppointmentBook
from trainwright.distributed.clusters import read_number, read_open_mpi, read_pmi, read_slurm, read_slurm_job, requeue
from trainwright.distributed.failures import FailureBoard, PeerWatch
from trainwright.distributed.network import LOOPBACK, interface_towards, loopback_interface
from trainwright.distributed.rank_positions import RankPositions
from trainwright.distributed.store import Store, open_store, stores
from trainwright.distributed.store_channel import StoreChannel

JOB_VARIABLE = "TRAINWRIGHT_JOB"
"""One JSON object: what our launcher tells its workers."""

STORE_PREFIX = "trainwright"
"""All our keys in the job's store stand under this prefix and the number of the restart."""


@dataclass(frozen=True)
class Environment:
    """The place of this process in its job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    """How many machines the job has; they need not run equally many processes."""
    launched_by: str = "single"
    """Who started this process: "single" (nobody), "trainwright" (our launcher), "torchrun", "slurm" or "mpi"."""
    main_address: str | None = None
    main_port: int | None = None
    has_agent_store: bool = False
    """Whether the launcher's agent holds the store; if not, rank 0 holds it."""
    restart_count: int = 0
    error_file: str | None = None
    """Where torchrun expects the error of this process."""
    strategy: str | None = None
    precision: str | None = None
    accelerator: str | None = None
    """With the two before: what the command line asked for, where the script leaves it open."""

    @classmethod
    def detect(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Read the environment variables of this process, or those given."""
        variables = os.environ if variables is None else variables
        for read in _READERS:
            found = read(variables)
            if found is not None:
                return found
        return cls()


def _read_torchrun(variables: Mapping[str, str]) -> Environment | None:
    """Read the variables that torch elastic sets, under torchrun and under our own launcher."""
    if not any(name in variables for name in ("RANK", "WORLD_SIZE")):
        return None  # a local rank alone is what `announce_place` tells
    needed = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    if variables.get("WORLD_SIZE") == "1":
        needed = needed[:4]
    missing = [name for name in needed if not variables.get(name)]
    if missing:
        given = ", ".join(f"{name}={variables[name]}" for name in needed if name in variables)
        raise ValueError(
            f"the environment has {given} but not {', '.join(missing)}; a job of several processes needs "
            f"{', '.join(needed)}. Start it with torchrun, or unset these variables to run as one process."
        )
    numbers = {name: read_number(variables, name, "torchrun") for name in needed if name != "MASTER_ADDR"}
    rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
    local_rank, local_world_size = numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"]
    if not (rank < world_size and local_rank < local_world_size <= world_size):
        raise ValueError(
            f"the environment has RANK={rank}, WORLD_SIZE={world_size}, LOCAL_RANK={local_rank}, "
            f"LOCAL_WORLD_SIZE={local_world_size}; ranks count from 0 and stay below their world size, and the local "
            "world is not larger than the world. Start the job with torchrun, or unset these variables for one process."
        )
    more = {"GROUP_RANK": rank // local_world_size, "GROUP_WORLD_SIZE": -(-world_size // local_world_size)}
    more["TORCHELASTIC_RESTART_COUNT"] = 0
    more |= {name: read_number(variables, name, "torchrun") for name in more if variables.get(name)}
    return Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=more["GROUP_RANK"],
        num_nodes=more["GROUP_WORLD_SIZE"],
        launched_by="trainwright" if JOB_VARIABLE in variables else "torchrun",
        main_address=variables.get("MASTER_ADDR"),
        main_port=numbers.get("MASTER_PORT"),
        has_agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        restart_count=more["TORCHELASTIC_RESTART_COUNT"],
        error_file=variables.get("TORCHELASTIC_ERROR_FILE") or None,
        **_read_job(variables),
    )


def _read_cluster(variables: Mapping[str, str]) -> Environment | None:
    """Read what Open MPI, SLURM or PMI set; in this order, as one of them may have started another."""
    for name, read in (("mpi", read_open_mpi), ("slurm", read_slurm), ("mpi", read_pmi)):
        task = read(variables)
        if task is not None:
            return Environment(launched_by=name, **asdict(task))
    return None


def _read_job(variables: Mapping[str, str]) -> dict[str, str | None]:
    """Read what our launcher tells its workers beside their place."""
    job = json.loads(variables.get(JOB_VARIABLE) or "{}")
    return {name: job.get(name) for name in ("strategy", "precision", "accelerator")}


def prepare_deterministic() -> None:
    """Let cuBLAS compute the same each time, unless the environment says how already; before a GPU is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def requeue_job() -> str:
    """Have SLURM start this process's job anew, and return what came of it in words; "" where there is no such job."""
    job = read_slurm_job(os.environ)
    return requeue(job) if job else ""


def announce_place(local_rank: int) -> None:
    """Tell libraries that read the environment this process's local rank, where it is not there."""
    os.environ.setdefault("LOCAL_RANK", str(local_rank))


@contextmanager
def announced(**variables: str) -> Iterator[None]:
    """Tell a library that reads the environment what is given, where it is not there, within the block."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


# The first reader that finds itself at home wins: torchrun and our launcher may run within SLURM or MPI.
_READERS: tuple[Callable[[Mapping[str, str]], Environment | None], ...] = (_read_torchrun, _read_cluster)


def pick_backend(device_type: str, *, on_host_too: bool = False) -> str:
    """Return the collective backend for a kind of device: gloo for the CPU, else the device's default one (NCCL, XCCL, ...).

    `on_host_too` adds gloo for tensors in host memory, for an engine that keeps its shards there.

    Raises:
        ValueError: torch has none for this kind of device.
    """
    import torch

    from trainwright.devices.abilities import collective_backend

    backend = collective_backend(device_type)
    if backend is None:
        raise ValueError(
            f"torch {torch.__version__} has no process group for {device_type!r}, so neither several processes nor strategies "
            "that need a process group can compute on it; pass devices=1 with strategy='auto', or accelerator='cpu'."
        )
    return f"cpu:gloo,{device_type}:{backend}" if on_host_too and device_type != "cpu" else backend


@dataclass
class Connection:
    """This process's connection to its job: the process group, the store and a channel over it."""

    environment: Environment
    backend: str | None
    channel: StoreChannel
    store: Store | None = None
    owns_group: bool = False
    """False where the user's script opened the group; then it also closes it."""
    _book: AppointmentBook = field(default_factory=lambda: AppointmentBook(None, 0, 1), repr=False)
    _watch: PeerWatch | None = field(default=None, repr=False)
    _holders: list[weakref.WeakMethod[Callable[[], None]]] = field(default_factory=list, repr=False)
    _pid: int = field(default_factory=os.getpid, repr=False)
    _is_closed: bool = field(default=False, repr=False)

    def appointment(self, name: str) -> Appointment:
        """Return a new appointment of all ranks, for one run of the loop.

        Those of one name pair up by their order: make them on every rank, in the same order. Nothing is sent.
        """
        return self._book.make(name)

    @property
    def has_failed(self) -> bool:
        """Whether an error of this process was posted, so that the other ranks leave."""
        return self._watch is not None and self._watch.has_failed

    def announce_stop(self, code: int) -> None:
        """Tell the launcher that a signal has stopped the run here, and with which code this rank is about to leave."""
        if self.store is not None:
            FailureBoard(self.store).announce_stop(code)

    def before_close(self, release: Callable[[], None]) -> None:
        """Have a bound method called before the group is closed: it lets go of what holds on to the group.

        NOTE: a group that is still held then goes on with its threads into the interpreter's shutdown, where the first of
        them that lets go of a tensor aborts the process (seen about once in ten runs on a busy machine).
        """
        self._holders.append(weakref.WeakMethod(release))

    def close(self) -> None:
        """Stop watching the peers and close the process group, if it was opened here. Safe to call twice."""
        global _connection
        if self._is_closed or os.getpid() != self._pid:  # a forked child inherits the object, not the group
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self._watch is not None:
            atexit.unregister(self._watch.stop)
        if _connection is self:
            _connection = None
        if self._watch is None:
            return
        if self.owns_group and not self._watch.has_failed and not self._watch.has_said_goodbye:
            with suppress(RuntimeError, OSError):  # the store's host may have been killed
                self.channel.leave()  # before the goodbye, which is what the host waits for
        self._watch.stop()
        # After a failure no communication is attempted: a peer that is gone would make it hang.
        if self.owns_group and not self._watch.has_failed:
            import torch.distributed as dist

            for holder in self._holders:
                if (release := holder()) is not None:
                    release()
            gc.collect()  # a DistributedDataParallel is a cycle
            if dist.is_initialized():
                dist.destroy_process_group()


_connection: Connection | None = None
_generation = 0  # how often this process opened a group; equal on all ranks, as opening is collective


def open_process_group(
    environment: Environment,
    backend: str,
    timeout_seconds: float = 1800.0,
    *,
    needs_group: bool = False,
    device_types: Sequence[str] = (),
) -> Connection:
    """Open this process's connection to its job, or return the one already open. Collective: call on every rank.

    A group that the script opened itself is joined and left open at the end. One process alone opens nothing, unless it
    `needs_group`: then one of this process alone, over which nothing is sent.

    `device_types` are those whose tensors are sent, first that of the device which this process computes on.

    Raises:
        RuntimeError: a group is open that belongs to another job, or has no backend for one of the `device_types`.
    """
    global _connection, _generation
    if environment.world_size == 1:
        if needs_group:
            _choose_interface(environment)
            _open_group_of_one(backend)
            _check_backends(device_types[:1])  # one process sends nothing that is elsewhere
        return Connection(environment, None, StoreChannel(None, environment.rank, 1))
    if _connection is not None:
        if _connection.environment != environment:
            raise RuntimeError(
                f"a process group is already open for {_connection.environment}, not for {environment}; "
                "a process belongs to one job. Close the first connection before opening another."
            )
        _check_backends(device_types)
        return _connection

    import torch.distributed as dist
    import torch.distributed.nn.functional  # noqa: F401 - imported later, its functions' defaults would hold on to the group

    timeout = timedelta(seconds=timeout_seconds)
    is_joined = dist.is_initialized()
    if is_joined:
        _check_joined_group(environment)
        _check_backends(device_types)
    base, store_host = open_store(environment, timeout, is_joined)
    job = stores().PrefixStore(f"{STORE_PREFIX}/{environment.restart_count}", base)
    # NOTE: a blocking call of one thread holds its connection, so the group, the channel and the watch have one each.
    control = job.clone()
    positions = RankPositions(environment.rank)
    watch, book = _start_watch(environment, backend, control, job.clone(), store_host, positions)
    atexit.register(watch.stop)
    plain_hook = sys.excepthook
    try:
        if not is_joined:
            _choose_interface(environment)
            dist.init_process_group(
                backend,
                store=stores().PrefixStore(f"group/{_generation}", job),
                rank=environment.rank,
                world_size=environment.world_size,
                timeout=timeout,
            )
    finally:
        # torch hooks in to put the rank before each line of a traceback; our launcher does that for all output.
        if environment.launched_by == "trainwright":
            sys.excepthook = plain_hook
        watch.wrap_excepthook()
    channel = StoreChannel(
        stores().PrefixStore(f"generation/{_generation}", control),
        environment.rank,
        environment.world_size,
        positions=positions,
    )
    _generation += 1
    opened = Connection(
        environment, dist.get_backend(), channel, control, owns_group=not is_joined, _book=book, _watch=watch
    )
    _connection = opened
    atexit.register(opened.close)
    return opened


def _open_group_of_one(backend: str) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        atexit.register(_close_group_of_one)


def _close_group_of_one() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _start_watch(
    environment: Environment,
    backend: str,
    control: Store,
    watched: Store,
    store_host: int | None,
    positions: RankPositions,
) -> tuple[PeerWatch, AppointmentBook]:
    """Start the watcher thread on a connection of its own; return it with the appointments that it looks after."""
    prefix = f"appointments/{_generation}"
    book = AppointmentBook(
        stores().PrefixStore(prefix, control),
        environment.rank,
        environment.world_size,
        synchronize=None if backend == "gloo" else _synchronize,
    )
    appointments = stores().PrefixStore(prefix, watched)
    requests = stores().PrefixStore(f"generation/{_generation}", watched)

    def look() -> None:
        book.look(appointments)
        positions.answer(requests)

    watch = PeerWatch(
        watched,
        environment.rank,
        environment.world_size,
        name=str(_generation),
        store_host=store_host,
        error_file=environment.error_file if environment.launched_by == "torchrun" else None,
        look=look,
    )
    watch.start()
    return watch, book


def _synchronize() -> None:
    import torch

    torch.accelerator.synchronize()


def _check_joined_group(environment: Environment) -> None:
    import torch.distributed as dist

    found = (dist.get_rank(), dist.get_world_size())
    if found != (environment.rank, environment.world_size):
        raise RuntimeError(
            f"torch.distributed is initialised as rank {found[0]} of {found[1]}, but the environment says "
            f"rank {environment.rank} of {environment.world_size}; both must agree. Leave the initialisation to us."
        )


def _check_backends(device_types: Sequence[str]) -> None:
    """Refuse a group, opened earlier in this process, that cannot send what is on one of these kinds of device."""
    import torch.distributed as dist

    config = dist.get_backend_config()  # "cpu:gloo,cuda:nccl"
    served = [each.partition(":")[0] for each in config.split(",")]
    if missing := [each for each in device_types if each not in served]:
        wanted = ",".join(f"{each}:{pick_backend(each)}" for each in device_types)
        raise RuntimeError(
            f"the process group of this process was opened with {config!r}, which has no backend for {missing[0]!r}; this run "
            f"needs {wanted!r}. Run it in a process of its own, or before the run that opened the group."
        )


def _choose_interface(environment: Environment) -> None:
    """Say where the group listens, unless the user has: one node is loopback only, several use the main address's way."""
    if environment.num_nodes == 1:
        name = loopback_interface()
        variables = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    else:  # by itself gloo takes what the host's name stands for, which may be loopback; NCCL looks for itself
        name = interface_towards(environment.main_address or LOOPBACK)
        variables = ["GLOO_SOCKET_IFNAME"]
    for variable in variables if name is not None else []:
        os.environ.setdefault(variable, str(name))
