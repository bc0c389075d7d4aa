"""What benchmarks/gpu.py measures on a device besides time: memory, kernels, copies, and reads that the host waits for."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

MIB = 2**20
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize")

"""Calls of the runtime in which the host waits, whoever makes them."""
WAIT_WARNINGS = ("called a synchronizing", "the host waits for the device")
"""How CUDA's sync debug mode says it, and how that of the tests' simulated device does."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; on a CPU, return at once."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Free the memory in torch's cache for the other processes on the device."""
    if device.type != "cpu":
        call = getattr(torch.accelerator, "empty_cache", None)
        call = call or getattr(torch.get_device_module(device), "empty_cache", None)
        if call is not None:
            call()


def reset_peak_memory(device: torch.device) -> None:
    _memory_call(device, "reset_peak_memory_stats")


def peak_memory_mib(device: torch.device) -> float | None:
    """Return the peak memory of tensors since the last reset; None if the device does not count it."""
    found = _memory_call(device, "max_memory_allocated")
    return None if not found else found / MIB


def _memory_call(device: torch.device, name: str) -> Any:
    if device.type == "cpu":
        return None
    for owner in (torch.accelerator, torch.get_device_module(device)):
        call = getattr(owner, name, None)
        if call is not None:
            try:
                return call(device)
            except (RuntimeError, AttributeError, NotImplementedError, TypeError):
                continue  # a device whose allocator keeps no statistics
    return None


def profiled_steps(device: torch.device, steps: int, found: dict[str, Any]) -> Iterator[None]:
    """Run `steps` steps under torch's profiler, recording only the device; put into `found` what it did per step.

    Each yielded item is a step; without a profiler for this device there are none. The first use in a process takes seconds
    and may miss its first steps, so discard its result.
    """
    activity = {"cuda": ProfilerActivity.CUDA, "xpu": getattr(ProfilerActivity, "XPU", None)}.get(device.type)
    if activity is None or activity not in torch.profiler.supported_activities():
        return
    profiler = torch.profiler.profile(activities=[activity])
    synchronize(device)
    profiler.start()
    for _ in range(steps):
        yield
    synchronize(device)
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found.update(read_trace(path.read_text(errors="replace"), steps))


def read_trace(text: str, steps: int) -> dict[str, Any]:
    """Return what a step did on the device, from a trace of several in Chrome's format; empty if the trace is."""
    trace = json.loads(text, strict=False)
    events = [each for each in trace.get("traceEvents", []) if each.get("ph") == "X"]
    work = [each for each in events if each.get("cat") in DEVICE_WORK[:3]]
    if not work:
        return {}
    found: dict[str, Any] = {
        "busy_ms": busy_microseconds(work) / 1e3 / steps,
        "kernels": sum(each["cat"] == "kernel" for each in work) / steps,
        "waits": sum(each.get("name") in WAITS for each in events) / steps,
    }
    for key, ways in (("h2d_kib", ("HtoD", "HostToDevice")), ("d2h_kib", ("DtoH", "DeviceToHost"))):
        copies = [
            each
            for each in work
            if each["cat"] == "gpu_memcpy" and any(way in each.get("name", "").replace(" ", "") for way in ways)
        ]
        found[key] = sum(float(each.get("args", {}).get("bytes", 0)) for each in copies) / 1024 / steps
    return found


def busy_microseconds(work: list[dict[str, Any]]) -> float:
    """Return how long at least one of these events was running: those on several streams overlap."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((float(each["ts"]), float(each["ts"]) + float(each.get("dur", 0))) for each in work):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def counted_waits(device: torch.device, steps: int, found: dict[str, Any]) -> Iterator[None]:
    """Run `steps` steps with torch's warning for reads that the host waits for; put their number per step into `found`."""
    module = torch.get_device_module(device) if device.type != "cpu" else None
    set_mode = getattr(module, "set_sync_debug_mode", None)
    if set_mode is None:
        return
    synchronize(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_mode("warn")
        try:
            for _ in range(steps):
                yield
        finally:
            set_mode("default")
    found["syncs"] = sum(any(text in str(each.message) for text in WAIT_WARNINGS) for each in caught) / steps
