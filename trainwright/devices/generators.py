"""Generators: RNG states of the accelerator's devices, by device number, and their way into another process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainwright.devices import cuda, hardware

NAMES = frozenset({"python", "numpy", "torch"})
"""The generators on the host. A mapping with these names is the RNG state of a process."""


def is_generator_state(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() >= NAMES


def device_state() -> dict[str, Any] | None:
    """Return the RNG states of the accelerator's devices, or None if this process uses none.

    "index" is the number of the current device, and "state" is its state. "others" has the states of the other devices that
    torch sees, by number, because a process may draw on them too.
    """
    device = hardware.current()
    if device is None:
        return None
    module: Any = torch.get_device_module(device)
    others = [each for each in range(hardware.count(device.type)) if each != device.index]
    states = {str(each): module.get_rng_state(each) for each in others}
    return {"type": device.type, "index": device.index, "state": module.get_rng_state(), "others": states}


def set_device_state(state: Mapping[str, Any] | None) -> None:
    """Restore the generators by device number. `taken_over` prepares the states of another process for this.

    States of another kind of device are skipped, and so are numbers that torch does not see.
    """
    device = hardware.current()
    if state is None or device is None or state["type"] != device.type:
        return
    module: Any = torch.get_device_module(device)
    present = hardware.count(device.type)
    for number, each in {state["index"]: state["state"], **state["others"]}.items():
        if int(number) == device.index:
            module.set_rng_state(each)
        elif int(number) < present:
            module.set_rng_state(each, int(number))


def owned(states: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the states with a device as the process's device, even if another device was current at the time."""
    state = states.get("device")
    if state is None or state["type"] != device.type or state["index"] == device.index:
        return dict(states)
    others = {**state["others"], str(state["index"]): state["state"]}
    main = others.pop(str(device.index))
    return {**states, "device": {"type": device.type, "index": device.index, "state": main, "others": others}}


def taken_over(states: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Return a checkpoint's states as a process on this device continues with them. Other devices go by their number.

    If they have none for this kind of device, its generator starts from `seed`. Otherwise it would repeat the numbers that the
    run has drawn since its start.
    """
    if device.type == "cpu":
        return dict(states)
    state = states.get("device")
    if state is None or state["type"] != device.type:
        started = torch.Generator(device).manual_seed(seed).get_state()
        state = {"type": device.type, "index": device.index, "state": started, "others": {}}
    others = {number: each for number, each in state["others"].items() if int(number) != device.index}
    return {**states, "device": {**state, "index": device.index, "others": others}}


def check_device_state(state: Any) -> None:
    """Raise ValueError or TypeError for an invalid state of an accelerator's generators, also if it is not present."""
    if state is None:
        return
    kind, main, others = state["type"], state["state"], state["others"]
    if not isinstance(kind, str) or not isinstance(others, Mapping) or not all(key.isdecimal() for key in others):
        raise TypeError("no kind of device, and states by number")
    device = hardware.current()
    for value in (main, *others.values()):
        if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
            raise TypeError("no row of bytes")
        if kind == cuda.NAME:
            cuda.check_generator_state(value)
        elif device is not None and device.type == kind:
            torch.Generator(device).set_state(value)


@contextmanager
def forked_generators() -> Iterator[None]:
    """Restore torch's generators, of the host and of the device, after the block."""
    host, device = torch.get_rng_state(), device_state()
    try:
        yield
    finally:
        torch.set_rng_state(host)
        set_device_state(device)
