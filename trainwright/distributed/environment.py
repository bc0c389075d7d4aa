"""Environment: which process of which job this is. clusters.py knows the variables of SLURM and MPI."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from trainwright.distributed.clusters import (
    Task,
    ray_train,
    read_number,
    read_open_mpi,
    read_pmi,
    read_slurm,
    read_slurm_job,
    requeue,
    tasks_without_srun,
)
from trainwright.distributed.network import LOOPBACK, interface_towards, loopback_interface

__all__ = ["RUNG_VARIABLE", "Environment", "rung_file"]

ALLOCATOR_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
JOB_VARIABLE = "TRAINWRIGHT_JOB"  # one JSON object that our launcher passes to its workers
RUNG_VARIABLE = "TRAINWRIGHT_RUNG"  # the file of the rung under which `trainwright ladder` runs a script


@dataclass(frozen=True)
class Environment(Task):
    """This process's place in its job, the launcher that started it, and the settings that the launcher passed on."""

    launched_by: str = "single"
    """The launcher: "single" (none), "trainwright" (ours), "torchrun", "ray", "slurm" or "mpi"."""
    has_agent_store: bool = False
    """Whether the launcher's agent hosts the store. Otherwise rank 0 does."""
    restart_count: int = 0
    error_file: str | None = None
    """The file in which torchrun expects the error of this process."""
    strategy: str | None = None
    precision: str | None = None
    accelerator: str | None = None
    gradient_accumulation_steps: int | None = None
    """This and the three above: from the command line or its config, for settings that the script does not choose."""
    waiting_tasks: int = 0
    """The number of tasks in this process's SLURM allocation, if srun did not start it."""
    device: str | None = None
    """The device that the launcher has assigned to this process, by its name for torch, or None if it assigns none."""

    @classmethod
    def detect(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Read the variables, by default this process's environment."""
        train = ray_train() if variables is None else None
        variables = os.environ if variables is None else variables
        # In this order, because torchrun and our launcher may run inside SLURM or MPI.
        environment = _read_torchrun(variables) or _read_cluster(variables)
        if train is not None and environment is not None:  # Ray's TorchTrainer sets torchrun's variables
            node, device = train.get_context().get_node_rank(), str(train.torch.get_device())
            return replace(environment, launched_by="ray", node_rank=node, device=device)
        return environment or cls(waiting_tasks=tasks_without_srun(variables))


def _read_torchrun(variables: Mapping[str, str]) -> Environment | None:
    """Read the variables that torch elastic sets, under torchrun and under our own launcher."""
    if not any(name in variables for name in ("RANK", "WORLD_SIZE")):
        return None  # `announce_local_rank` sets only LOCAL_RANK
    if not any(variables.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")) and variables.get("MASTER_PORT"):
        variables = {**variables, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # Kubeflow starts one process per pod
    needed = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    if variables.get("WORLD_SIZE") == "1":
        needed = needed[:4]
    missing = [name for name in needed if not variables.get(name)]
    if missing:
        present = ", ".join(f"{name}={variables[name]}" for name in needed if name in variables)
        raise ValueError(
            f"the environment has {present} but not {', '.join(missing)}; a job of several processes needs "
            f"{', '.join(needed)}. Start it with torchrun, or unset these variables to run as one process."
        )
    numbers = {name: read_number(variables, name, "torchrun") for name in needed if name != "MASTER_ADDR"}
    rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
    local_rank, local_world_size = numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"]
    if not (rank < world_size and local_rank < local_world_size <= world_size):
        raise ValueError(
            f"the environment has RANK={rank}, WORLD_SIZE={world_size}, LOCAL_RANK={local_rank}, "
            f"LOCAL_WORLD_SIZE={local_world_size}; ranks count from 0 and stay below their world size. Start the job with "
            "torchrun, or unset these variables for one process."
        )
    more = {"GROUP_RANK": rank // local_world_size, "GROUP_WORLD_SIZE": -(-world_size // local_world_size)}
    more["TORCHELASTIC_RESTART_COUNT"] = 0
    more |= {name: read_number(variables, name, "torchrun") for name in more if variables.get(name)}
    job: dict[str, Any] = json.loads(variables.get(JOB_VARIABLE) or "{}")
    options = ("strategy", "precision", "accelerator", "gradient_accumulation_steps")
    given: dict[str, Any] = {name: job.get(name) for name in options}
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
        **given,
    )


def _read_cluster(variables: Mapping[str, str]) -> Environment | None:
    """Read the variables of Open MPI, SLURM or PMI, in this order, because a later one may have started an earlier one."""
    for name, read in (("mpi", read_open_mpi), ("slurm", read_slurm), ("mpi", read_pmi)):
        task = read(variables)
        if task is not None:
            return Environment(launched_by=name, **asdict(task))
    return None


def argument_variables(owner: str) -> dict[str, str]:
    """Return the values of the variables TRAINWRIGHT_<OWNER>_<ARGUMENT>, by argument."""
    prefix = f"TRAINWRIGHT_{owner.upper()}_"
    return {name.removeprefix(prefix).lower(): value for name, value in os.environ.items() if name.startswith(prefix)}


def rung_file() -> str | None:
    """Return the file of the rung under which this process runs, or None if no ladder has started it."""
    return os.environ.get(RUNG_VARIABLE) or None


def prepare_deterministic() -> None:
    """Make cuBLAS deterministic, unless the environment configures it. Call before a GPU is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def keep_freed_memory(most: int) -> None:
    """Let glibc keep the memory of freed tensors of up to `most` bytes, unless the environment configures its allocator.

    By default glibc returns it to the kernel, and each step faults it in again: 8,000 page faults for 20 M parameters.
    TRAINWRIGHT_KEEP_FREED_MEMORY=0 keeps the default.
    """
    is_glibc = "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", ())
    is_wanted = os.environ.get("TRAINWRIGHT_KEEP_FREED_MEMORY") != "0"
    if is_glibc and is_wanted and os.environ.keys().isdisjoint(ALLOCATOR_VARIABLES):
        libc = _libc()
        # M_MMAP_THRESHOLD: larger tensors have pages of their own. Before 2.35 glibc accepts at most 32 MiB.
        if not libc.mallopt(-3, most):
            libc.mallopt(-3, 32 << 20)
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def requeue_job() -> str:
    """Requeue this process's SLURM job and return the result in words, or "" if it has no job."""
    job = read_slurm_job(os.environ)
    return requeue(job) if job else ""


def announce_local_rank(environment: Environment) -> None:
    """Set the variables of this process's local rank for other libraries, unless they are set."""
    os.environ.setdefault("LOCAL_RANK", str(environment.local_rank))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(environment.local_world_size))


@contextmanager
def announced(**variables: str) -> Iterator[None]:
    """Set variables within the block, unless they are set, for a library that reads the environment."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def choose_interface(environment: Environment) -> None:
    """Set the interface on which the group listens, unless the user has: loopback on one node, else towards rank 0."""
    if environment.num_nodes == 1:
        name = loopback_interface()
        variables = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    else:  # gloo would take the host name's address, which may be loopback; NCCL finds an interface itself
        name = interface_towards(environment.main_address or LOOPBACK)
        variables = ["GLOO_SOCKET_IFNAME"]
    for variable in variables if name is not None else []:
        os.environ.setdefault(variable, str(name))
