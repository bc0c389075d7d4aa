"""The simulated accelerator "sim", as `torch.sim`: the functions that torch expects of a device, and functions for
tests.

torch calls `register` at its import if this folder is on the module path. README.md describes the device.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

_native: Any = None
nvtx = None


def register() -> None:
    """Make "sim" a device of torch, with `torch.sim`, tensor.sim(), autocast and a collective backend."""
    global _native
    if _native is not None:
        return
    import simulated_build

    _check_variables()
    torch.utils.rename_privateuse1_backend("sim")
    _native = simulated_build.load_native()
    torch._register_device_module("sim", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(_tell_what_was_not_told)
    if torch.distributed.is_available() and os.environ.get("SIM_PROCESS_GROUP", "1") != "0":
        backend: Any = torch.distributed.Backend
        backend.register_backend("simccl", _collectives, devices=["sim"])
        # torch looks for the first of these upper-case names among lower-case ones, to find the default of a group like
        # "cpu:gloo,sim:simccl". Without one, DDP cannot be made.
        backend._plugins = {"simccl": backend._plugins["SIMCCL"], **backend._plugins}


def _tell_what_was_not_told() -> None:
    """Say at the end of a process which violation no call could raise any more."""
    if not _is_in_bad_fork():
        _native.look_once_more()
        if _native.unread_violation():
            print(f"sim: {violations()[-1]}", file=sys.stderr)


def _collectives(store: torch.distributed.Store, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = torch.distributed.ProcessGroupGloo(torch.distributed.PrefixStore("simccl", store), rank, size, timeout)
    return _native.collectives(gloo, timeout)


def _check_variables() -> None:
    number = os.environ.get("SIM_DEVICES", "2")
    if not number.isdigit():
        raise ValueError(f"SIM_DEVICES={number!r}: a number of devices is accepted.")
    accepted = dict.fromkeys(("SIM_FLOAT64", "SIM_PINNED", "SIM_BF16", "SIM_PROCESS_GROUP"), ("0", "1"))
    for name, values in {**accepted, "SIM_VIOLATIONS": ("raise", "count")}.items():
        if os.environ.get(name, values[0]) not in values:
            raise ValueError(f"{name}={os.environ[name]!r}: {' and '.join(values)} are accepted.")


# ---- devices


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return bool(_native.is_initialized()) and not _is_in_bad_fork()


def init() -> None:
    pass


def device_count() -> int:
    return int(_native.device_count())


def current_device() -> int:
    return int(_native.current_device())


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device if device >= 0 else current_device()
    device = torch.device(device)
    if device.type != "sim":
        raise ValueError(f"expected a device of type sim, got {device}")
    return current_device() if device.index is None else int(device.index)


def set_device(device: Any) -> None:
    _native.set_device(_index(device))


@contextlib.contextmanager
def device(of: Any) -> Iterator[None]:
    """Make another device the current one."""
    before = current_device()
    set_device(of)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: Any = None) -> str:
    return f"Simulated device {_index(device)}"


def synchronize(device: Any = None) -> None:
    torch._C._accelerator_synchronizeDevice(_index(device))


def _is_in_bad_fork() -> bool:
    return bool(_native.is_in_bad_fork())


def _refuse_bad_fork() -> None:
    if _is_in_bad_fork():
        raise RuntimeError(
            "Cannot re-initialize sim in forked subprocess: this process was forked from one that uses it."
        )


# ---- random numbers


def manual_seed(seed: int) -> None:
    _native.default_generator(current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _native.default_generator(index).manual_seed(int(seed))


def seed_all() -> None:
    for index in range(device_count()):
        _native.default_generator(index).seed()


def initial_seed() -> int:
    return int(_native.default_generator(current_device()).initial_seed())


def get_rng_state(device: Any = None) -> torch.Tensor:
    _refuse_bad_fork()
    state: torch.Tensor = _native.default_generator(_index(device)).get_state()
    return state


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _refuse_bad_fork()
    _native.default_generator(_index(device)).set_state(state)


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


# ---- streams and events


class Stream(torch.Stream):
    """A stream of a device: `torch.sim.Stream()`."""

    def __new__(cls, device: Any = None, priority: int = 0, **kept: int) -> Stream:
        if kept:
            return super().__new__(cls, priority=priority, **kept)  # type: ignore[call-overload,no-any-return]
        return super().__new__(cls, device=torch.device("sim", _index(device)), priority=priority)  # type: ignore[call-overload,no-any-return]


class Event(torch.Event):
    """An event of the device: `torch.sim.Event()`."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(
            cls, device="sim", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("sim", _index(device)))


def default_stream(device: Any = None) -> torch.Stream:
    index = _index(device)
    return torch.Stream(stream_id=0, device_index=index, device_type=int(torch._C._autograd.DeviceType.PrivateUse1))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(to: torch.Stream | None) -> Iterator[None]:
    """Make another stream the current one."""
    if to is None:
        yield
        return
    with to:
        yield


# ---- memory


def set_memory_limit(limit: int, device: Any = None) -> None:
    """Allow at most `limit` bytes in use on the device; 0 removes the limit."""
    _native.set_memory_limit(limit, _index(device))


def memory_stats(device: Any = None) -> OrderedDict[str, Any]:
    return torch.accelerator.memory_stats(_index(device))


def _bytes(kind: str, moment: str, device: Any) -> int:
    return int(memory_stats(device).get(f"{kind}_bytes.all.{moment}", 0))


def memory_allocated(device: Any = None) -> int:
    return _bytes("allocated", "current", device)


def max_memory_allocated(device: Any = None) -> int:
    return _bytes("allocated", "peak", device)


def memory_reserved(device: Any = None) -> int:
    return _bytes("reserved", "current", device)


def max_memory_reserved(device: Any = None) -> int:
    return _bytes("reserved", "peak", device)


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and the total bytes of the device."""
    free, total = _native.mem_get_info(_index(device))
    return int(free), int(total)


# ---- precision


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16] if is_bf16_supported() else [torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return os.environ.get("SIM_BF16", "1") != "0"


def refuse_float64(on: bool) -> None:
    """With True, making or copying a float64 tensor on the device raises TypeError, as on MPS."""
    _native.refuse_float64(on)


# ---- functions for tests


def counts() -> tuple[int, int, int, int, int]:
    """Return (copies to the device, copies to the host, scalars read by the host, bytes in, bytes out) so far."""
    return _native.counts()  # type: ignore[no-any-return]


def refuse_sync(on: bool) -> None:
    """With True, every read of the device by the host, and every other wait for it, raises until called with False."""
    _native.refuse(int(on), False)


def set_sync_debug_mode(mode: int | str) -> None:
    """Take "default", "warn" or "error", as `torch.cuda` does. Copies to the device that are not non_blocking count
    too."""
    number = {"default": 0, "warn": 1, "error": 2}.get(mode, mode) if isinstance(mode, str) else mode
    if number not in (0, 1, 2):
        raise RuntimeError(f"invalid value of the debug mode, {mode!r}; expected 'default', 'warn' or 'error'")
    _native.refuse(2 if number == 2 else 0, number == 1)


def get_sync_debug_mode() -> int:
    refused, warns = _native.refused()
    return 2 if refused == 2 else int(warns)


def violations() -> list[str]:
    """Return the violations so far: races between streams, and pinned memory or freed memory that is used too early."""
    return _native.violations()  # type: ignore[no-any-return]


def clear_violations() -> None:
    _native.clear_violations()


def raise_violations(on: bool) -> None:
    """Choose whether the operator, copy or wait after a violation raises (the default), or only `violations()` reports
    it."""
    _native.raise_violations(on)


def pending(device: Any = None) -> int:
    """Return how many copies the device's streams have not carried out."""
    return int(_native.pending(_index(device)))
