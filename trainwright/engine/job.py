"""Job: how many processes a job has, which device this one computes on, and how it joins or starts them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from trainwright.devices import num_cores
from trainwright.devices.abilities import num_together
from trainwright.devices.hardware import count, resolve_device_type, use
from trainwright.distributed.connection import Connection, open_process_group, pick_backend
from trainwright.distributed.environment import Environment
from trainwright.distributed.vendor import set_timeout
from trainwright.errors import a_type_of
from trainwright.overrides import overridden
from trainwright.precision import Precision, is_spelling_of, resolve_precision
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies import SPAWNING, Strategy, is_variant_of, resolve_strategy

DEFAULT_SECONDS = 1800.0
NEWEST_TORCH = (2, 15)
"""The newest torch that the tests have passed with."""

JoinedJob = tuple[Environment, Strategy, Precision, torch.device, Connection, float, int]
"""The job's parts as an Engine uses them, the seconds that ranks wait for each other, and the workers to start for a call."""


def join_job(
    devices: int | str | list[int],
    strategy: str | Strategy,
    precision: str | int | Precision | None,
    accelerator: str,
    timeout_seconds: float | None,
    num_nodes: int,
    can_call_workers: bool,
) -> JoinedJob:
    """Check the settings, join the job of this process or start one, and open its connection. Collective.

    The arguments are the Engine's.
    """
    environment = Environment.detect()
    devices = overridden("Engine", "devices", devices)
    num_nodes = overridden("Engine", "num_nodes", num_nodes)
    accelerator = overridden("Engine", "accelerator", accelerator)
    strategy = overridden("Engine", "strategy", strategy, is_like=is_variant_of)
    precision = overridden("Engine", "precision", precision, is_like=is_spelling_of)
    check_nodes(num_nodes, environment)
    device_type = _choose_device_type(accelerator, environment)
    num_processes = resolve_num_processes(devices, device_type, environment)
    is_launched = environment.launched_by != "single"
    world_size = environment.world_size if is_launched else num_processes * max(num_nodes, 1)
    warn_of_missing_srun(world_size, environment.waiting_tasks)
    chosen = resolve_strategy(strategy, world_size)
    chosen_precision = resolve_precision(precision, device_type)
    chosen.check(device_type, world_size, chosen_precision)
    needs_group = world_size > 1 or chosen.capabilities.needs_group
    on_host_too = chosen.capabilities.communicates_on_host
    backend = pick_backend(device_type, on_host_too=on_host_too) if needs_group else ""
    num_workers = 0
    if not is_launched and (num_processes > 1 or num_nodes != 1):
        # Returns only if workers run the calls. Then this process computes nothing, and uses no GPU.
        num_workers = _start_job(num_processes, num_nodes, strategy, can_call_workers)
        chosen, device_type, backend = Strategy(), "cpu", "gloo"
    warn_of_untested_torch()
    device = torch.device("cpu")
    if device_type != "cpu":
        device = torch.device(device_type, device_index(devices, device_type, environment))
        use(device)
    if not num_workers:
        chosen_precision.check(device)
    chosen_seconds = chosen.timeout_seconds if timeout_seconds is None else timeout_seconds
    seconds = DEFAULT_SECONDS if chosen_seconds is None else chosen_seconds
    device_types = [device_type, "cpu"] if on_host_too and device_type != "cpu" else [device_type]
    connection = open_process_group(
        environment, backend, seconds, needs_group=chosen.capabilities.needs_group, device_types=device_types
    )
    if chosen_seconds is not None or connection.owns_group:
        set_timeout(seconds)  # the group may have been opened before, with a different timeout
    connection.before_close(chosen.close)
    return environment, chosen, chosen_precision, device, connection, seconds, num_workers


def _choose_device_type(accelerator: str, environment: Environment) -> str:
    """Return the type of this process's device, with "auto" the type of an assigned device."""
    device_type = resolve_device_type(accelerator)
    if accelerator == "auto" and environment.device is not None:
        return torch.device(environment.device).type
    return device_type


def _start_job(num_processes: int, num_nodes: int, strategy: str | Strategy, can_call_workers: bool) -> int:
    """Replace this process with the launcher, or return how many workers to start for a call (LaunchError if neither)."""
    from trainwright.launch.command import calls_workers, check_worker_calls
    from trainwright.launch.processes import launch

    reason = f"devices={num_processes}"
    spawns = isinstance(strategy, str) and strategy in SPAWNING
    if can_call_workers and num_nodes == 1 and (spawns or calls_workers()):  # workers run on this machine only
        check_worker_calls(reason)
        return num_processes
    launch(num_processes, num_nodes=num_nodes, reason=reason)


def device_numbers(devices: Any, device_type: str) -> list[int] | None:
    """Return the GPUs of a list such as [0, 2] or a text such as "0,2", which must exist, or None for any other setting."""
    if isinstance(devices, str) and "," in devices:
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        devices = [int(part) if part.isdigit() else part for part in parts]
    if not isinstance(devices, (list, tuple)):
        return None
    if not devices or not all(type(number) is int and number >= 0 for number in devices):
        raise TypeError(f"devices={devices!r} is not a list of GPUs; pass their numbers, such as [0, 2] or '0,2'.")
    if device_type == "cpu":
        raise ValueError(
            f"devices={devices!r} names devices of an accelerator, but this run computes on the CPU; pass the number of "
            f"processes, devices={len(devices)}."
        )
    present = count(device_type)
    if absent := [number for number in devices if number >= present]:
        raise ValueError(
            f"devices={devices!r}: torch sees no {device_type!r} {', '.join(map(str, absent))}; choose from "
            f"{', '.join(map(str, range(present)))}."
        )
    return list(devices)


def resolve_num_processes(devices: int | str | list[int], device_type: str, environment: Environment) -> int:
    """Return the number of this job's processes on this node, one per device.

    "auto" is the launcher's count if launched, otherwise all GPUs, otherwise 1. -1 is all GPUs, or all cores.

    Raises:
        TypeError: neither an int nor a list nor "auto".
        ValueError: below 1, more than there are GPUs, or not the number that this job was launched with.
    """
    wanted = _read_devices(devices, device_type)
    launched = environment.local_world_size if environment.launched_by != "single" else 1
    if max(wanted, launched) > 1:
        pick_backend(device_type)  # raises for an accelerator that torch has no process group for
    present = count(device_type)
    is_limited = device_type != "cpu" and not _has_own_device(device_type, environment)
    most = max(wanted, launched if launched > 1 else 0)
    if is_limited and most > present:
        raise ValueError(
            f"devices={most} is more than the {present} of {device_type!r} that torch sees; pass or launch at most that many, "
            "or pass accelerator='cpu' to try several processes."
        )
    if environment.launched_by == "single":
        return {AUTO: num_together(device_type) or 1, ALL: present or num_cores()}.get(wanted, wanted)
    if wanted not in (AUTO, ALL, launched):
        raise ValueError(
            f"devices={wanted} was passed, but this job was launched with {launched} processes on this node; pass "
            f"devices={launched} or devices='auto', or launch {wanted}."
        )
    return launched


AUTO, ALL = 0, -1


def _read_devices(devices: Any, device_type: str) -> int:
    """Return the number of devices that a setting asks for, AUTO or ALL."""
    numbers = device_numbers(devices, device_type)
    if numbers is not None:
        return len(numbers)
    if devices == "auto":
        return AUTO
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    if isinstance(devices, bool) or not isinstance(devices, int):
        raise TypeError(
            f"devices={devices!r} is {a_type_of(devices)}; expected a number of devices, a list of "
            "GPUs, -1 for all, or 'auto'."
        )
    if devices < 1 and devices != ALL:
        raise ValueError(f"devices={devices} is below 1; pass a number of devices, -1 for all, or 'auto'.")
    return devices


def device_index(devices: Any, device_type: str, environment: Environment) -> int:
    """Return the number of the accelerator's device that this process computes on."""
    numbers = device_numbers(devices, device_type)
    if numbers is not None:
        return numbers[environment.local_rank]
    if (assigned := _assigned_device(device_type, environment)) is not None:
        return assigned.index or 0
    return 0 if _has_own_device(device_type, environment) else environment.local_rank


def _assigned_device(device_type: str, environment: Environment) -> torch.device | None:
    """Return the device of this type that the launcher has assigned to this process, which others may share, or None."""
    assigned = None if environment.device is None else torch.device(environment.device)
    return assigned if assigned is not None and assigned.type == device_type else None


def _has_own_device(device_type: str, environment: Environment) -> bool:
    # For example, `srun --gpus-per-task=1` shows a process only its own device.
    is_alone = environment.launched_by in ("slurm", "mpi") and count(device_type) == 1
    return is_alone or _assigned_device(device_type, environment) is not None


@cache
def warn_of_missing_srun(num_processes: int, num_tasks: int) -> None:
    """Warn, once, of a job with fewer processes than its SLURM allocation has tasks."""
    if num_processes < num_tasks:
        rank_zero_warn(
            f"srun did not start this script, so the job has {num_processes} process(es), and its SLURM allocation {num_tasks} "
            "tasks: start the script with srun, as in `srun python train.py`, or ask for one task."
        )


@cache
def warn_of_untested_torch(newest: tuple[int, int] = NEWEST_TORCH) -> None:
    """Warn, once, of a torch that is newer than the newest tested one."""
    if tuple(map(int, torch.__version__.split(".")[:2])) > newest:
        rank_zero_warn(
            f"torch {torch.__version__} is newer than {newest[0]}.{newest[1]}, the newest version that was tested here. "
            "If a run fails within torch, install that version or a newer trainwright."
        )


def check_nodes(num_nodes: int, environment: Environment) -> None:
    """Raise ValueError for a number of nodes that differs from the job that this process was launched in."""
    if environment.launched_by != "single" and num_nodes not in (1, environment.num_nodes):
        raise ValueError(
            f"num_nodes={num_nodes} was passed, but this job was launched on {environment.num_nodes}; omit num_nodes, or "
            f"launch {num_nodes}."
        )
