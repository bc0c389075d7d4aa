"""Hardware: the one device type, besides the CPU, that torch has here, its memory, and the machine in words."""

from __future__ import annotations

import difflib
import functools
import gc
import importlib.metadata
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainwright.devices import cuda, num_cores
from trainwright.errors import a_type_of

__all__ = ["accelerator_type", "count", "describe_devices", "package_versions", "resolve_device_type"]

GENERAL = "gpu"
"""The name for any accelerator that torch has."""
HOST = torch.device("cpu")
OTHER_WORDS = dict.fromkeys(("rocm", "hip", "nvidia", "amd"), cuda.NAME) | {
    "metal": "mps",
    "mac": "mps",
    "intel": "xpu",
}
"""Rejected names, and the suggestions for them."""
OUT_OF_MEMORY = (
    *cuda.OUT_OF_MEMORY,
    "MPS backend out of memory",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""Texts of torch's out-of-memory errors, where they are plain RuntimeErrors."""
PACKAGES = (
    *("torch", "numpy", "torchmetrics", "fsspec", "safetensors", "cloudpickle", "PyYAML", "tqdm"),
    *("deepspeed", "fairscale", "tensorboard", "transformers", "accelerate", "lightning"),
)
"""The packages whose versions a report shows."""
MISSING = "not installed"
PEAK_FLOPS = {
    "H200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "A10G": 70e12, "A10": 125e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "V100": 125e12, "T4": 65e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip
"""FLOP/s of dense 16-bit matrix products by a part of the device's name, from the vendors' data sheets."""
_used: set[str] = set()
"""The accelerator types that this process computes on. Some of torch's modules do not record this."""
os.register_at_fork(after_in_child=_used.clear)


def names() -> tuple[str, ...]:
    """Return the names that `accelerator=` accepts, except "auto" and backends unknown to torch."""
    private = torch._C._get_privateuse1_backend_name()
    return ("cpu", GENERAL, cuda.NAME, "mps", "xpu", *([] if private == "privateuseone" else [private]))


def built_for() -> str | None:
    """Return the accelerator type that torch was built for, without asking a driver whether one is present."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def accelerator_type() -> str | None:
    """Return the type of the current accelerator ("cuda", "mps", "xpu", ...), or None if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def is_available(device_type: str) -> bool:
    """Return whether torch can compute on this device type here."""
    if device_type == "cpu":
        return True
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except (RuntimeError, AttributeError):  # an unknown type, or a type without a module
        return False


def resolve_device_type(accelerator: Any) -> str:
    """Return the device type of a name. "auto" is the current accelerator, or else the CPU.

    ValueError if the name is unknown, RuntimeError if torch does not have this accelerator here.
    """
    accepted = ", ".join(("auto", *names()))
    if not isinstance(accelerator, str):
        raise TypeError(
            f"accelerator={accelerator!r} is {a_type_of(accelerator)}; expected {accepted}. Pass a device's number in devices=."
        )
    if accelerator == "cpu":
        return accelerator  # without asking a driver
    kind, _, number = accelerator.partition(":")
    if kind in names() and number.isdecimal():
        instead = "'cpu'" if kind == "cpu" else f"{kind!r} with devices=[{number}]"
        raise ValueError(f"accelerator={accelerator!r} names a device by its number; pass accelerator={instead}.")
    here = accelerator_type()
    wanted = {"auto": here or "cpu", GENERAL: here}.get(accelerator, accelerator)
    if wanted is not None and is_available(wanted):
        if wanted in (here or wanted, "cpu"):
            return wanted
        raise RuntimeError(
            f"accelerator={accelerator!r} was requested, but torch {torch.__version__} uses {here!r} as this process's "
            f"accelerator, and supports one kind at a time; pass accelerator={here!r} or 'cpu'."
        )
    if accelerator in names():
        has, other = ("no accelerator", "'cpu'") if here is None else (repr(here), f"'auto' for {here!r}, or 'cpu'")
        raise RuntimeError(
            f"accelerator={accelerator!r} was requested, but torch {torch.__version__} has {has} here; check that torch was "
            f"built for it and that its driver is installed, or pass accelerator={other}."
        )
    name = accelerator.lower()
    close = OTHER_WORDS.get(name) or next(iter(difflib.get_close_matches(name, names(), n=1, cutoff=0.7)), None)
    hint = f" Did you mean {close!r}?" if close else " Import the package of another backend first."
    raise ValueError(f"accelerator={accelerator!r} is unknown; choose from {accepted}.{hint}")


def count(device_type: str | None = None) -> int:
    """Return how many devices of a type torch sees, by default of the current accelerator; 0 for the CPU."""
    device_type = built_for() if device_type is None else device_type
    if device_type in (None, "cpu"):
        return 0
    return int(torch.get_device_module(device_type).device_count())


def use(device: torch.device) -> None:
    """Make a device the current device of this process, in the calling thread."""
    if device.type == "cpu":
        return
    _used.add(device.type)
    _select(device)
    torch.empty(1, device=device)  # until a device is used, torch's DeviceMesh chooses one by LOCAL_RANK


def _select(device: torch.device) -> None:
    module: Any = torch.get_device_module(device)
    if hasattr(module, "set_device"):
        module.set_device(device)
    else:
        torch.accelerator.set_device_index(device)


@contextmanager
def using(device: torch.device) -> Iterator[None]:
    """Make a device the current device of this thread for the block, then restore the previous one."""
    before = current()
    if before == device:
        yield
        return
    use(device)
    try:
        yield
    finally:
        if before is not None and device.type != "cpu":
            _select(before)  # allocates nothing there, because its memory may be full


def current() -> torch.device | None:
    """Return the accelerator's device that this thread computes on, or None if the process has used none so far."""
    kind = built_for()  # asks no driver, which a run on the CPU does not need
    if kind is None:
        return None
    is_initialized = getattr(torch.get_device_module(kind), "is_initialized", None)
    # False in a process forked from one that uses the device, where the device cannot be used.
    if not (kind in _used if is_initialized is None else is_initialized()):
        return None
    return torch.device(kind, torch.accelerator.current_device_index())


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished all work issued to it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of a device that this process may use: free memory and its allocator's cache, or None if unknown."""
    module: Any = torch.get_device_module(device)
    try:
        if hasattr(module, "mem_get_info"):
            return int(module.mem_get_info(device)[0] + module.memory_reserved(device))
        if hasattr(module, "recommended_max_memory"):  # MPS: a part of the host's memory
            return int(module.recommended_max_memory() - module.current_allocated_memory())
        return int(torch.accelerator.get_memory_info(device)[0] + torch.accelerator.memory_reserved(device))
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or its cause, says that a device or the host has too little memory."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(cause, RuntimeError) and any(text in str(cause) for text in OUT_OF_MEMORY):
            return True
        cause = cause.__cause__
    return False


def free_unused_memory() -> None:
    """Collect garbage, and return the accelerator's unused memory to its driver."""
    gc.collect()
    if accelerator_type() is not None:
        torch.accelerator.empty_cache()


def describe_devices() -> str:
    """Return this machine's devices in words."""
    kind, num_devices = accelerator_type(), count()
    cores = f"{num_cores()} CPU cores"
    if kind is None or not num_devices:
        return f"{cores} and no GPU"
    module = torch.get_device_module(kind)
    name = module.get_device_name(0) if hasattr(module, "get_device_name") else kind
    return f"{cores} and {num_devices} GPU(s): {name}"


def peak_memory(device: torch.device) -> str:
    """Return this process's peak memory so far, of the host and of its device, in words."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peak = getattr(torch.get_device_module(device), "max_memory_allocated", lambda _: None)(device)
    return f"{host / 2**30:.2f} GiB of the host" + ("" if peak is None else f", {peak / 2**30:.2f} GiB of {device}")


def peak_flops(device: torch.device) -> float | None:
    """Return a known GPU's FLOP/s in dense 16-bit matrix products, or None."""
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    name = name_of(device) if name_of is not None else ""
    if "Laptop" in name:  # slower than the card of the same name
        return None
    return next((flops for part, flops in PEAK_FLOPS.items() if re.search(rf"\b{part}\b", name)), None)


def package_versions() -> dict[str, str]:
    """Return the versions of the packages, or MISSING."""
    return {name: _version(name) for name in PACKAGES}


@functools.cache
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return MISSING
