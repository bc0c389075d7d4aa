"""Accelerator: the one device type, besides the CPU, that torch has here."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainwright.devices import cuda
from trainwright.errors import a_type_of

__all__ = ["accelerator_type", "count", "resolve_device_type"]

GENERAL = "gpu"
"""The name for whatever accelerator torch has."""
HOST = torch.device("cpu")
OTHER_WORDS = dict.fromkeys(("rocm", "hip", "nvidia", "amd"), cuda.NAME) | {
    "metal": "mps",
    "mac": "mps",
    "intel": "xpu",
}
"""Names that are not accepted, and the suggestion for each."""
_used: set[str] = set()
"""The accelerator types that this process computes on; some of torch's modules do not record it."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_used.clear)


def names() -> tuple[str, ...]:
    """Return the names that `accelerator=` accepts, except "auto" and those of backends unknown to torch."""
    own = torch._C._get_privateuse1_backend_name()
    return ("cpu", GENERAL, cuda.NAME, "mps", "xpu", *([] if own == "privateuseone" else [own]))


def built_for() -> str | None:
    """Return the accelerator type that torch was built for, without asking a driver whether one is present."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def accelerator_type() -> str | None:
    """Return the type of the current accelerator ("cuda", "mps", "xpu", ...); None without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def is_available(device_type: str) -> bool:
    """Return whether torch can compute on this device type here."""
    if device_type == "cpu":
        return True
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except (RuntimeError, AttributeError):  # an unknown type, or one without a module
        return False


def resolve_device_type(accelerator: Any) -> str:
    """Return the device type of a name; "auto" is the current accelerator, else the CPU.

    ValueError if the name is unknown, RuntimeError if torch does not have this accelerator here.
    """
    accepted = ", ".join(("auto", *names()))
    if not isinstance(accelerator, str):
        kind = getattr(accelerator, "type", None)  # of a torch.device
        number = getattr(accelerator, "index", None) if kind != "cpu" else None
        hint = f" Pass {kind!r}{'' if number is None else f' with devices=[{number}]'}." if kind else ""
        raise TypeError(f"accelerator={accelerator!r} is {a_type_of(accelerator)}; expected {accepted}.{hint}")
    if accelerator == "cpu":
        return accelerator
    here = accelerator_type()
    if accelerator == "auto":
        return here or "cpu"
    kind, _, number = accelerator.partition(":")
    if kind in names() and number.isdecimal():
        instead = "'cpu'" if kind == "cpu" else f"{kind!r} with devices=[{number}]"
        raise ValueError(f"accelerator={accelerator!r} names a device by its number; pass accelerator={instead}.")
    wanted = here if accelerator == GENERAL else accelerator
    if wanted is not None and is_available(wanted):
        if here is not None and wanted != here:
            raise RuntimeError(
                f"accelerator={accelerator!r} was asked for, but torch {torch.__version__} takes {here!r} for this process's "
                f"accelerator, and works with one kind at a time; pass accelerator={here!r} or 'cpu'."
            )
        return wanted
    if accelerator not in names():
        name = accelerator.lower()
        close = OTHER_WORDS.get(name) or next(iter(difflib.get_close_matches(name, names(), n=1, cutoff=0.7)), None)
        hint = f" Did you mean {close!r}?" if close else " A backend of another package has to be imported first."
        raise ValueError(f"accelerator={accelerator!r} is unknown; choose from {accepted}.{hint}")
    has, other = ("no accelerator", "'cpu'") if here is None else (repr(here), f"'auto' for {here!r}, or 'cpu'")
    raise RuntimeError(
        f"accelerator={accelerator!r} was asked for, but torch {torch.__version__} has {has} here; check that torch was built "
        f"for it and that its driver is there, or pass accelerator={other}."
    )


def count(device_type: str | None = None) -> int:
    """Return how many devices of a type torch sees, by default of the current accelerator; 0 for the CPU."""
    device_type = built_for() if device_type is None else device_type
    if device_type in (None, "cpu"):
        return 0
    return int(torch.get_device_module(device_type).device_count())


def use(device: torch.device) -> None:
    """Make a device the current one of this process, in the calling thread."""
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
    """Make a device the current one of this thread for the block, then restore the previous one."""
    before = current()
    if before == device:
        yield
        return
    use(device)
    try:
        yield
    finally:
        if before is not None and device.type != "cpu":
            _select(before)  # allocates nothing there: its memory may be full


def current() -> torch.device | None:
    """Return the accelerator's device that this thread computes on; None if the process has used none so far."""
    kind = built_for()  # asks no driver, which a run on the CPU does not need
    if kind is None:
        return None
    is_initialized = getattr(torch.get_device_module(kind), "is_initialized", None)
    # In a process forked from one that uses the device this is False, and the device cannot be used.
    if not (kind in _used if is_initialized is None else is_initialized()):
        return None
    return torch.device(kind, torch.accelerator.current_device_index())


def wait_for(device: torch.device) -> None:
    """Wait until a device has computed all that was issued to it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of a device's memory that this process may use: free memory and what its allocator caches.

    None if the device does not report it.
    """
    module: Any = torch.get_device_module(device)
    try:
        if hasattr(module, "mem_get_info"):
            return int(module.mem_get_info(device)[0] + module.memory_reserved(device))
        if hasattr(module, "recommended_max_memory"):  # MPS: a part of the host's memory
            return int(module.recommended_max_memory() - module.current_allocated_memory())
        return int(torch.accelerator.get_memory_info(device)[0] + torch.accelerator.memory_reserved(device))
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
