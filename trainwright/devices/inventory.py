"""Inventory: what this machine has, in words: its devices and the versions of packages."""

from __future__ import annotations

import functools
import importlib.metadata
import resource
import sys

import torch

from trainwright.devices import accelerator
from trainwright.devices.cores import num_cores

__all__ = ["describe_devices", "package_versions"]

PACKAGES = (
    *("torch", "numpy", "torchmetrics", "fsspec", "safetensors", "cloudpickle", "PyYAML", "tqdm"),
    *("deepspeed", "fairscale", "tensorboard", "transformers", "accelerate", "lightning"),
)
"""The packages whose versions a report shows."""
MISSING = "not installed"


def describe_devices() -> str:
    """Return a machine's devices in words."""
    kind, count = accelerator.accelerator_type(), accelerator.count()
    cores = f"{num_cores()} CPU cores"
    if kind is None or not count:
        return f"{cores} and no GPU"
    module = torch.get_device_module(kind)
    name = module.get_device_name(0) if hasattr(module, "get_device_name") else kind
    return f"{cores} and {count} GPU(s): {name}"


def peak_memory(device: torch.device) -> str:
    """Return the most memory that this process has taken so far, of the host and of its device, in words."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peak = getattr(torch.get_device_module(device), "max_memory_allocated", lambda _: None)(device)
    return f"{host / 2**30:.2f} GiB of the host" + ("" if peak is None else f", {peak / 2**30:.2f} GiB of {device}")


def package_versions() -> dict[str, str]:
    """Return the versions of the packages; MISSING for one that is not installed."""
    return {name: _version(name) for name in PACKAGES}


@functools.cache
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return MISSING
