"""The job of a launcher: its command, its machines, and the address at which they meet."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from trainwright.devices import num_cores
from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.distributed.masking import masked
from trainwright.distributed.network import LOOPBACK, loopback_interface


@dataclass(frozen=True)
class Nodes:
    """The machines of a job, and which of them this is.

    Node 0 is the main one. `address` and `port` are its name or IP address, as all nodes reach it, and its port. Port 0
    chooses a free one, for a job of one node.

    Raises:
        ValueError: a number is out of range.
    """

    count: int = 1
    """How many there are, at most."""
    rank: int | None = 0
    """This machine's number, or None if the nodes are numbered as they arrive, after the main one."""
    address: str = LOOPBACK
    port: int = 0
    fewest: int | None = None
    """With how many the job starts if no more come, or None for `count`."""
    wait_seconds: float = 300
    """How long the nodes wait for the fewest."""

    def __post_init__(self) -> None:
        if self.rank is not None and not 0 <= self.rank < self.count:
            raise ValueError(
                f"node_rank={self.rank} is out of range for num_nodes={self.count}; nodes are numbered from 0 to "
                f"{self.count - 1}. Give each node its own number, by --node-rank or the variable NODE_RANK."
            )
        if not 0 <= self.port < 65536 or (self.port == 0 and self.count > 1):
            raise ValueError(f"main_port={self.port} is not a port. Pass one from 1 to 65535, the same on every node.")

    @property
    def least(self) -> int:
        return self.count if self.fewest is None else self.fewest

    def __str__(self) -> str:
        return f"num_nodes={self.count}" if self.rank is not None else f"nodes={self.least}:{self.count}"


@dataclass(frozen=True)
class Job:
    """The work of one launcher on its machine: `num_processes` workers with the same command."""

    command: list[str]
    num_processes: int
    nodes: Nodes = Nodes()
    max_restarts: int = 0
    """How many times all ranks are restarted after a failure."""
    logs: str | None = None
    """The folder for the output of the ranks, one file per rank."""
    grace_seconds: float = 120
    """How long the ranks have to save and exit after a signal."""
    job_id: str | None = None
    """A name that tells this job from others at the same address, or None for one that its command gives."""
    defaults: Mapping[str, str | None] = field(default_factory=dict)
    """Settings that the script may leave open, by the names of `Environment`."""

    @property
    def name(self) -> str:
        """The id of the job, or its command without the folders of the script and of Hydra, which differ between nodes."""
        parts = [part for part in self.command[1:] if not part.startswith(("hydra.run.dir=", "hydra.sweep.dir="))]
        return self.job_id or masked([os.path.basename(part) if part.endswith(".py") else part for part in parts]).text


class Place(NamedTuple):
    """The ranks of this machine among those of the job, in one start of the job."""

    address: str
    port: int
    counts: tuple[int, ...]
    """The number of ranks on every node."""
    hosts: tuple[str, ...]
    """The names of the nodes."""
    node: int = 0
    start: int = 0
    """The number of the start, from 0."""

    @property
    def world_size(self) -> int:
        return sum(self.counts)

    def first_rank(self, node: int) -> int:
        return sum(self.counts[:node])

    def variables(self, local_rank: int, job: Job) -> dict[str, str]:
        """Return the environment of a rank, with the variables that torchrun sets."""
        rank, world_size = str(self.first_rank(self.node) + local_rank), str(self.world_size)
        variables = {
            **os.environ,
            "TRAINWRIGHT_GRACE_SECONDS": f"{0.9 * job.grace_seconds:.0f}",  # so that a rank that hangs prints its stack
            "RANK": rank,
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.node),
            "ROLE_RANK": rank,
            "ROLE_NAME": "trainwright",
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": str(self.counts[self.node]),
            "GROUP_WORLD_SIZE": str(len(self.hosts)),
            "ROLE_WORLD_SIZE": world_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RESTART_COUNT": str(self.start),
            "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
            "TORCHELASTIC_RUN_ID": job.job_id or f"trainwright-{self.port}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            JOB_VARIABLE: json.dumps(dict(job.defaults)),
        }
        if len(self.hosts) == 1 and (loopback := loopback_interface()):  # also for a group that the script opens
            variables |= {
                "GLOO_SOCKET_IFNAME": loopback,
                "NCCL_SOCKET_IFNAME": variables.get("NCCL_SOCKET_IFNAME", loopback),
            }
        # Without it the torch of every rank starts one thread per core.
        variables.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // job.num_processes)))
        variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        for name in ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
            variables.pop(name, None)  # of the launcher
        return variables


class JobOutcome(NamedTuple):
    """The end of a start of the ranks."""

    code: int
    reason: str = ""
    """Which rank failed first, or why the ranks start again. Empty if the job has ended well."""
    rest: str = ""
    """More lines to print."""
    may_restart: bool = True
    """Whether this machine runs the ranks again, if there is a reason and restarts are left."""
