"""Devices: how many processes a job has, and which device each of them computes on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from trainwright.devices.abilities import num_together
from trainwright.devices.hardware import count, names
from trainwright.distributed.connection import pick_backend
from trainwright.distributed.environment import Environment
from trainwright.errors import a_type_of
from trainwright.rank_zero import rank_zero_warn


def device_numbers(devices: Any, device_type: str) -> list[int] | None:
    """Return the GPUs of a list such as [0, 2] or a text such as "0,2", which must exist; None for any other setting."""
    if isinstance(devices, str) and "," in devices:
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        devices = [int(part) if part.isdigit() else part for part in parts]
    if not isinstance(devices, (list, tuple)):
        return None
    if not devices:
        raise ValueError(
            f"devices={devices!r} names no device; pass the numbers of some, such as [0, 2], or 'auto' for all."
        )
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in devices):
        raise TypeError(f"devices={devices!r} is not a list of GPUs; pass their numbers, such as [0, 2] or '0,2'.")
    if device_type == "cpu":
        raise ValueError(
            f"devices={devices!r} names devices of an accelerator, but this run computes on the CPU; pass the number of "
            f"processes, devices={len(devices)}."
        )
    present = count(device_type)
    if len(set(devices)) < len(devices):
        raise ValueError(f"devices={devices!r} names a device twice; pass a different one for each process.")
    if absent := [each for each in devices if each >= present]:
        numbers, those = ", ".join(map(str, absent)), ", ".join(map(str, range(present)))
        raise ValueError(f"devices={devices!r}: torch sees no {device_type!r} {numbers}; choose from {those}.")
    return list(devices)


def resolve_num_processes(devices: int | str | list[int], device_type: str, environment: Environment) -> int:
    """Return the number of this job's processes on this node, one per device.

    "auto" is the launcher's count if launched, otherwise all GPUs, otherwise 1. -1 is all GPUs, or all cores.

    Raises:
        TypeError: neither an int nor a list nor "auto".
        ValueError: below 1, more than there are GPUs, or not the number that this job was launched with.
    """
    launched = environment.local_world_size if environment.launched_by != "single" else None
    present = count(device_type) if device_type != "cpu" else None
    has_own = _has_own_device(device_type, environment)  # then the one GPU it sees limits nothing
    numbers = device_numbers(devices, device_type)
    if numbers is not None:
        devices = len(numbers)
    elif isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    if (isinstance(devices, int) and devices > 1) or (launched or 1) > 1:
        pick_backend(device_type)  # raises for an accelerator that torch has no process group for
    if present is not None and launched is not None and not has_own and launched > present:
        raise ValueError(
            f"this job was launched with {launched} processes on this node, but torch sees {present} GPU(s) here; launch at "
            "most one process a GPU, or pass accelerator='cpu'."
        )
    if devices == "auto":
        return launched or num_together(device_type) or 1
    if isinstance(devices, str) and devices in ("cpu", *names()):
        raise ValueError(
            f"devices={devices!r} names a kind of device; pass accelerator={devices!r}, and as devices their number, or 'auto'."
        )
    if isinstance(devices, bool) or not isinstance(devices, int):
        raise TypeError(
            f"devices={devices!r} is {a_type_of(devices)}; expected a number of devices, a list of "
            "GPUs, -1 for all, or 'auto'."
        )
    if devices == -1:
        devices = launched or present or torch.get_num_threads()  # torch's default is one thread per core
    if devices < 1:
        raise ValueError(f"devices={devices} is below 1; pass a number of devices, -1 for all, or 'auto'.")
    if present is not None and devices > present and not has_own:
        raise ValueError(
            f"devices={devices} is more than the {present} of {device_type!r} that torch sees; pass at most that many, or "
            "accelerator='cpu' to try several processes."
        )
    if launched is not None and devices != launched:
        raise ValueError(
            f"devices={devices} was given, but this job was launched with {launched} processes on this node; pass "
            f"devices={launched} or devices='auto', or launch {devices}."
        )
    return devices


def device_index(devices: Any, device_type: str, environment: Environment) -> int:
    """Return the number of the accelerator's device that this process computes on."""
    numbers = device_numbers(devices, device_type)
    if numbers is not None:
        return numbers[environment.local_rank]
    return 0 if _has_own_device(device_type, environment) else environment.local_rank


def _has_own_device(device_type: str, environment: Environment) -> bool:
    # `srun --gpus-per-task=1`, for one, shows each process only its own device.
    return environment.launched_by in ("slurm", "mpi") and count(device_type) == 1


@cache
def warn_of_missing_srun(num_processes: int, num_tasks: int) -> None:
    """Warn, once, of a job with fewer processes than its SLURM allocation has tasks."""
    if num_processes < num_tasks:
        rank_zero_warn(
            f"srun did not start this script, so the job has {num_processes} process(es), and its SLURM allocation {num_tasks} "
            "tasks: start the script with srun, as in `srun python train.py`, or ask for one task."
        )


def check_nodes(num_nodes: int, environment: Environment) -> None:
    """Refuse a number of nodes that is not that of the job that this process was launched in (ValueError)."""
    if environment.launched_by != "single" and num_nodes not in (1, environment.num_nodes):
        raise ValueError(
            f"num_nodes={num_nodes} was given, but this job was launched on {environment.num_nodes}; leave num_nodes out, or "
            f"launch {num_nodes}."
        )
