"""Clusters: the place of a process in a job of SLURM, MPI or Ray, and SLURM's requeue."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from trainwright.distributed.network import DEFAULT_PORT, LOOPBACK

Variables = Mapping[str, str]

FIRST_PORT, NUM_PORTS = 12000, 20000  # the ports derived from a job's number, below the ports that the kernel assigns
REQUEUE_SECONDS = 30.0  # for scontrol
NO_STEP_OF_TASKS = ("4294967290", "4294967291", "4294967292", "4294967293", "4294967294")
"""SLURM's numbers of steps that srun did not start, such as the interactive shell and the batch script."""

RAY_SCHEMES = {"local": "", "s3": "s3://"}
"""How a path begins, by the type of Ray's file system."""


@dataclass(frozen=True)
class Task:
    """Which process of a job this is."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    """The number of machines of the job, which may run different numbers of processes."""
    main_address: str | None = None
    main_port: int | None = None
    job: str = ""
    """The name of the job, which all of its processes know, or "" if the launcher gives none."""


def read_number(variables: Variables, name: str, starter: str) -> int:
    """Return a variable as an integer of at least 0 (ValueError otherwise). `starter` is the command that usually sets it."""
    try:
        number = int(variables[name])
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError(
            f"the environment has {name}={variables[name]!r}; expected an integer of at least 0. "
            f"Start the job with {starter}, or unset the variable to run as one process."
        )
    return number


def read_slurm(variables: Variables) -> Task | None:
    """Return the task of a process that srun has started, or None. A batch script lacks the variables of a step."""
    step = variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID", "0"))
    if "SLURM_PROCID" not in variables or not _is_in_step(variables):
        return None
    size = _first_name(variables, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), "srun")
    world_size = read_number(variables, size, "srun")
    if world_size == 1:
        return None
    # Other launchers start by srun. Then their variables say which process this is.
    if variables.get("PMI_SIZE", str(world_size)) != str(world_size):
        return None
    hosts_name = _first_name(variables, ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"), "srun")
    hosts = expand_hosts(variables[hosts_name])
    names = [_first_name(variables, (f"SLURM_{name}",), "srun") for name in ("PROCID", "LOCALID", "NODEID")]
    rank, local_rank, node_rank = (read_number(variables, name, "srun") for name in names)
    tasks = _tasks_per_node(variables, world_size, len(hosts))
    is_consistent = rank < world_size and node_rank < len(hosts) == len(tasks) and sum(tasks) == world_size
    if not is_consistent or local_rank >= tasks[node_rank]:
        raise ValueError(
            f"the environment has SLURM_PROCID={rank}, SLURM_LOCALID={local_rank}, SLURM_NODEID={node_rank}, "
            f"{size}={world_size} and {hosts_name}={variables[hosts_name]}, with {tasks} tasks on its nodes; these are "
            "inconsistent. Start the script with srun, or unset the variables of SLURM to run as one process."
        )
    job = int(variables.get("SLURM_JOB_ID", variables.get("SLURM_JOBID", "0")) or 0)
    # Concurrent steps of a job need different ports too; 7919 is coprime to the number of ports.
    port = FIRST_PORT + (job + 7919 * (int(step) if step.isdigit() else 0)) % NUM_PORTS
    address = LOOPBACK if len(hosts) == 1 else variables.get("MASTER_ADDR") or hosts[0]
    place = rank, local_rank, world_size, tasks[node_rank], node_rank, len(hosts), address, main_port(variables, port)
    return Task(*place, f"{variables.get('SLURM_CLUSTER_NAME', 'SLURM')} {job}.{step}")


def tasks_without_srun(variables: Variables) -> int:
    """Return the number of tasks in the SLURM allocation if srun has not started this process, or 0."""
    tasks = variables.get("SLURM_NTASKS", "") if read_slurm_job(variables) and not _is_in_step(variables) else ""
    return int(tasks) if tasks.isdigit() else 0


def _is_in_step(variables: Variables) -> bool:
    is_task = any(name in variables for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST"))
    return is_task and variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID", "0")) not in NO_STEP_OF_TASKS


def read_slurm_job(variables: Variables) -> str:
    """Return the number of this process's SLURM job, as scontrol takes it, or "" outside of a job."""
    parts = [variables.get(name, "") for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")]
    parts = parts if all(parts) else [variables.get("SLURM_JOB_ID") or variables.get("SLURM_JOBID", "")]
    return "_".join(parts) if all(part.isascii() and part.isdigit() for part in parts) else ""


def requeue(job: str) -> str:
    """Requeue a SLURM job, and return the result in words."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=REQUEUE_SECONDS, check=False)
        failure = f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure:
        return f"SLURM's job {job} could not be requeued ({failure}); restart it by hand."
    return f"SLURM's job {job} was requeued."


def read_open_mpi(variables: Variables) -> Task | None:
    """Return the task of a process that Open MPI's mpirun has started with others."""
    names = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return _read_mpi(variables, names) if any(name in variables for name in names[:2]) else None


def read_pmi(variables: Variables) -> Task | None:
    """Return the task of a process that the mpirun of MPICH or Intel MPI has started with others."""
    if "PMI_RANK" not in variables or "PMI_SIZE" not in variables:
        return None
    is_mpich = "MPI_LOCALRANKID" not in variables and "PMI_LOCAL_RANK" in variables
    local = ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE") if is_mpich else ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _read_mpi(variables, ("PMI_RANK", "PMI_SIZE", *local))


def _read_mpi(variables: Variables, names: tuple[str, ...]) -> Task | None:
    if variables.get(names[1]) == "1":
        return None
    rank, world_size, local_rank, local_size = (
        read_number(variables, _first_name(variables, (name,), "mpirun"), "mpirun") for name in names
    )
    given = ", ".join(f"{name}={variables[name]}" for name in names)
    if rank >= world_size or local_rank >= local_size or local_size > world_size:
        raise ValueError(
            f"the environment has {given}; ranks count from 0 and stay below their world size. Start the job with mpirun, or "
            "unset these variables to run as one process."
        )
    num_nodes = world_size // local_size
    if world_size % local_size or rank % local_size != local_rank:
        raise ValueError(
            f"the environment has {given}; MPI does not say which node this is, so all nodes have to run the same number "
            "of processes, numbered node by node. Start the same number on every node (mpirun --map-by ppr:N:node), or use "
            "srun or torchrun."
        )
    address = LOOPBACK if num_nodes == 1 else variables.get("MASTER_ADDR")
    if not address:
        raise ValueError(
            f"the environment has {given}, so the job has {num_nodes} nodes, but not MASTER_ADDR; several nodes need the "
            "address of the node of rank 0. Pass it on to all processes, as in mpirun -x MASTER_ADDR=node01."
        )
    names_of_job = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_PORT")
    job = next((variables[name] for name in names_of_job if name in variables), "")
    port = FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS if job else DEFAULT_PORT
    node = rank // local_size
    return Task(rank, local_rank, world_size, local_size, node, num_nodes, address, main_port(variables, port), job)


def main_port(variables: Variables, otherwise: int) -> int:
    """Return MASTER_PORT if it is set (ValueError if it is not a port), else `otherwise`."""
    if not variables.get("MASTER_PORT"):
        return otherwise
    port = read_number(variables, "MASTER_PORT", "torchrun, srun or mpirun")
    if not 0 < port < 65536:
        raise ValueError(
            f"the environment has MASTER_PORT={port}; ports from 1 to 65535 are accepted. Set another, or unset it."
        )
    return port


def expand_hosts(text: str) -> list[str]:
    """Return the host names of SLURM's short form: "node[01-03,7],gpu5" is node01, node02, node03, node7, gpu5."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[\[\]]", text)
    return [host for part in parts for host in _expand_one(part)]


def _expand_one(name: str) -> list[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    inside, _, after = rest.partition("]")
    numbers: list[str] = []
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)] if dash else [part]
    return [before + number + tail for number in numbers for tail in _expand_one(after)]


def _tasks_per_node(variables: Variables, world_size: int, num_nodes: int) -> list[int]:
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text = next((variables[name] for name in names if variables.get(name)), None)
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text or f"{world_size // num_nodes}(x{num_nodes})")
    return [int(count) for count, times in counts for _ in range(int(times or 1))]


def _first_name(variables: Variables, names: tuple[str, ...], starter: str) -> str:
    if found := next((name for name in names if variables.get(name)), ""):
        return found
    raise ValueError(
        f"the environment has variables of {starter}, but no {' or '.join(names)}; a job of several processes needs it. Start "
        f"the job with {starter}, or unset its variables to run as one process."
    )


def ray_train() -> ModuleType | None:
    """Return the module `ray.train` in a worker of Ray Train, or None in any other process."""
    train = sys.modules.get("ray.train")  # a worker has imported it
    if train is None or not hasattr(train, "CheckpointUploadMode"):  # Ray Train V1 lacks names that are used here
        return None
    try:
        train.get_context()
    except (RuntimeError, DeprecationWarning):  # this is the driver, or a function of Ray Tune
        return None
    return train


def ray_folder() -> str | None:
    """Return the run's folder in the storage of Ray Train, or None outside of a worker and if no path leads to it."""
    train = ray_train()
    if train is None:
        return None
    try:
        storage = train.get_context().get_storage()
    except NotImplementedError:  # num_workers=0
        return None
    scheme = RAY_SCHEMES.get(storage.storage_filesystem.type_name)
    return None if scheme is None else f"{scheme}{storage.experiment_fs_path}"
