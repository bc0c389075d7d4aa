"""Abilities: trials of what a device type can do, made once on the device.

A device's name decides only where it does in torch: its DataLoader pins no memory for MPS.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trainwright.devices import hardware

__all__ = ["autocasts", "collective_backend", "num_together", "times_events"]

CAUGHT = (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError)
"""Errors of devices that cannot do something. Device types differ in them."""
PASSING = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of devices that may be able to do it later. They are raised, and no answer is cached."""


def _asked_once(ask: Callable[..., bool]) -> Callable[..., bool]:
    """Return a function that runs a trial once and caches whether the device can do it."""

    @functools.wraps(ask)
    def answer(*question: Any) -> bool:
        try:
            return ask(*question)
        except PASSING:
            raise
        except CAUGHT:
            return False

    return functools.cache(answer)


@_asked_once
def computes_in(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether a device has tensors of a dtype and can add them."""
    one = torch.ones(1, dtype=dtype, device=device_type)
    return (one + one).dtype == dtype


def widest_float(device_type: str) -> torch.dtype:
    """Return float64, or float32 on a device that lacks it (MPS)."""
    return torch.float64 if computes_in(device_type, torch.float64) else torch.float32


@_asked_once
def autocasts(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether torch.autocast computes in a dtype on a device."""
    with warnings.catch_warnings(record=True), torch.no_grad():
        warnings.simplefilter("always")  # if it has no such autocast, torch warns and computes in float32
        one = torch.ones(1, 1, dtype=torch.float32, device=device_type)
        with torch.autocast(device_type, dtype):
            return torch.mm(one, one).dtype == dtype


@_asked_once
def scales_losses(device_type: str) -> bool:
    """Return whether torch.amp.GradScaler works on a device. Except on MPS it computes the inverse scale in float64."""
    weight = torch.ones(1, dtype=torch.float32, device=device_type, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    scaler = torch.amp.GradScaler(device_type)
    scaler.scale(torch.ones_like(weight))
    scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
    return True


@_asked_once
def has_pinned_memory(device_type: str) -> bool:
    """Return whether a device copies asynchronously from page-locked host memory."""
    if device_type in ("cpu", "mps"):  # torch's DataLoader warns if it is to pin memory for MPS
        return False
    page = torch.empty(1, device="cpu", pin_memory=True)
    return page.is_pinned() and page.to(device_type, non_blocking=True).device.type == device_type


@_asked_once
def has_streams(device_type: str) -> bool:
    """Return whether a device has concurrent streams."""
    if device_type == "cpu":
        return False
    side = torch.Stream(torch.device(device_type, torch.accelerator.current_device_index()))
    with side:
        copy = torch.zeros(1, device=device_type)
    torch.accelerator.current_stream().wait_event(side.record_event())
    copy.record_stream(torch.accelerator.current_stream())
    return True


@_asked_once
def times_events(device_type: str) -> bool:
    """Return whether a device's events measure the time between them."""
    if device_type == "cpu":
        return False
    first, second = (torch.Event(torch.device(device_type), enable_timing=True) for _ in range(2))
    first.record()
    second.record()
    second.synchronize()
    return first.elapsed_time(second) >= 0


def copies_aside(device_type: str) -> bool:
    """Return whether a device can copy a batch on one stream while it computes on another."""
    return has_pinned_memory(device_type) and has_streams(device_type)


@_asked_once
def fuses(device_type: str, optimizer: str, dtype: torch.dtype) -> bool:
    """Return whether torch has a fused step of "Adam", "SGD" or "Adagrad" for parameters of a dtype on a device."""
    weight = torch.ones(2, dtype=dtype, device=device_type, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    # With momentum, because SGD has a different fused kernel for momentum buffers.
    momentum = {"momentum": 0.9} if optimizer == "SGD" else {}
    made = getattr(torch.optim, optimizer)([weight], lr=0.1, fused=True, **momentum)
    type(made).step.__wrapped__(made)  # bypasses torch's wrapper, which calls the user's global optimizer hooks
    return True


def collective_backend(device_type: str) -> str | None:
    """Return the backend of torch.distributed for tensors on a device, or None if torch has none."""
    try:
        backend = str(dist.get_default_backend_for_device(device_type))
    except (ValueError, RuntimeError):
        return None
    # The default for MPS is gloo, which does not take its tensors.
    takes = dist.Backend.backend_capability.get(backend)
    return backend if takes is None or device_type in takes else None


def num_together(device_type: str) -> int:
    """Return how many devices a job can use together: 0 for the CPU, at most 1 if torch has no process group for them."""
    present = hardware.count(device_type)
    return present if collective_backend(device_type) is not None else min(present, 1)
