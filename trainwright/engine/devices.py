"""Devices: how many processes a job has and which device each of them computes on."""

from __future__ import annotations

import difflib
from typing import Any

import torch

from trainwright.distributed.environment import Environment

ACCELERATORS = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda"}


def resolve_device_type(accelerator: str) -> str:
    """Return "cpu" or "cuda"; "auto" is cuda where there is a GPU.

    Raises:
        ValueError: the name is unknown.
        TypeError: it is no name.
        RuntimeError: a GPU is asked for and none is there.
    """
    if not isinstance(accelerator, str):
        raise TypeError(
            f"accelerator={accelerator!r} is a {type(accelerator).__name__}; accepted are auto, {', '.join(ACCELERATORS)}."
        )
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator not in ACCELERATORS:
        close = difflib.get_close_matches(accelerator, ACCELERATORS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"accelerator={accelerator!r} is unknown; choose from auto, {', '.join(ACCELERATORS)}.{hint}")
    if ACCELERATORS[accelerator] == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"accelerator={accelerator!r} was asked for, but torch sees no CUDA device; check the driver and the torch build, "
            "or pass accelerator='cpu'."
        )
    return ACCELERATORS[accelerator]


def device_numbers(devices: Any, device_type: str) -> list[int] | None:
    """Return the numbers of the GPUs that a list such as [0, 2] or a text such as "0,2" names; None for any other setting.

    Raises:
        TypeError, ValueError: no list of different numbers of GPUs that are there.
    """
    if isinstance(devices, str) and "," in devices:
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        devices = [int(part) if part.isdigit() else part for part in parts]
    if not isinstance(devices, (list, tuple)):
        return None
    if not devices or not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in devices):
        raise TypeError(f"devices={devices!r} is no list of GPUs; pass their numbers, such as [0, 2] or '0,2'.")
    if device_type != "cuda":
        raise ValueError(
            f"devices={devices!r} names GPUs, but this run computes on the CPU; pass a number of processes, such as devices=2."
        )
    if len(set(devices)) < len(devices) or max(devices) >= torch.cuda.device_count():
        raise ValueError(
            f"devices={devices!r} names a GPU twice, or one that is not there (torch sees {torch.cuda.device_count()})."
        )
    return list(devices)


def resolve_num_processes(devices: int | str | list[int], device_type: str, environment: Environment) -> int:
    """Return how many processes this job has on this node: one a device.

    "auto" is what the launcher of this job started, else every GPU, else one process on the CPU. -1 is every GPU, or
    every core.

    Raises:
        TypeError: neither an int nor a list nor "auto".
        ValueError: below 1, more than the GPUs there are, or unlike the job that this process was launched in.
    """
    launched = environment.local_world_size if environment.launched_by != "single" else None
    present = torch.cuda.device_count() if device_type == "cuda" else None
    numbers = device_numbers(devices, device_type)
    if numbers is not None:
        devices = len(numbers)
    if present is not None and launched is not None and not _has_own_gpu(environment) and launched > present:
        raise ValueError(
            f"this job was launched with {launched} processes on this node, but torch sees {present} GPU(s) here; launch at "
            "most one process a GPU, or pass accelerator='cpu'."
        )
    if devices == "auto":
        return launched or present or 1
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    if isinstance(devices, bool) or not isinstance(devices, int):
        raise TypeError(
            f"devices={devices!r} is a {type(devices).__name__}; accepted are a number of devices, a list of "
            "GPUs, -1 for all, or 'auto'."
        )
    if devices == -1:
        devices = launched or present or torch.get_num_threads()
    if devices < 1:
        raise ValueError(f"devices={devices} is below 1; pass a number of devices, -1 for all, or 'auto'.")
    if present is not None and devices > present and not _has_own_gpu(environment):
        raise ValueError(f"devices={devices} GPUs were asked for, but torch sees {present}; pass at most that many.")
    if launched is not None and devices != launched:
        raise ValueError(
            f"devices={devices} was asked for, but this job was launched with {launched} processes on this node; pass "
            f"devices={launched} or devices='auto', or launch {devices}."
        )
    return devices


def device_index(devices: Any, environment: Environment) -> int:
    """Return the number of the GPU that this process computes on."""
    numbers = device_numbers(devices, "cuda")
    if numbers is not None:
        return numbers[environment.local_rank]
    return 0 if _has_own_gpu(environment) else environment.local_rank


def _has_own_gpu(environment: Environment) -> bool:
    """Whether the cluster's launcher shows each process the one GPU that is its own (srun --gpus-per-task=1)."""
    return environment.launched_by in ("slurm", "mpi") and torch.cuda.device_count() == 1


def check_nodes(num_nodes: int, environment: Environment) -> None:
    """Refuse a number of nodes that the job which this process was launched in does not have (ValueError)."""
    if environment.launched_by == "single" or num_nodes in (1, environment.num_nodes):
        return
    raise ValueError(
        f"num_nodes={num_nodes} was asked for, but this job was launched on {environment.num_nodes}; leave num_nodes out, or "
        f"launch {num_nodes}."
    )
