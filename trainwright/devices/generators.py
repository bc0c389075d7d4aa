"""Generators: the states of those on the accelerator, this process's own device first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainwright.devices import accelerator, cuda


def device_state() -> dict[str, Any] | None:
    """Return the states of the accelerator's generators; None where this process uses none.

    "state" is that of the device it computes on, whose number is "index"; "others" are those of the further devices that
    torch sees, by number: a process may draw on them too.
    """
    device = accelerator.current()
    if device is None:
        return None
    module: Any = torch.get_device_module(device)
    others = [each for each in range(accelerator.count(device.type)) if each != device.index]
    return {
        "type": device.type,
        "index": device.index,
        "state": module.get_rng_state(),
        "others": {str(each): module.get_rng_state(each) for each in others},
    }


def set_device_state(state: Mapping[str, Any] | None) -> None:
    """Put the generators back to what `device_state` returned, also where this process computes on another device.

    What is of another kind of device than the one in use is left out, and so is what `lost_devices` names.
    """
    device = accelerator.current()
    if state is None or device is None or state["type"] != device.type:
        return
    module: Any = torch.get_device_module(device)
    module.set_rng_state(state["state"])
    present = accelerator.count(device.type)
    for number, other in state["others"].items():
        if int(number) != device.index and int(number) < present:
            module.set_rng_state(other, int(number))


def lost_devices(state: Mapping[str, Any] | None) -> list[str]:
    """Return the numbers of further devices that the states' process has drawn from and that cannot be put back here."""
    device = accelerator.current()
    if state is None or device is None or state["type"] != device.type:
        return []
    present = accelerator.count(device.type)
    gone = [number for number in state["others"] if int(number) == device.index or int(number) >= present]
    return [number for number in gone if _has_drawn(device, state["others"][number])]


def derived_device_state(seed: int) -> dict[str, Any] | None:
    """Return what `device_state` would return with this process's own device's generator seeded; nothing is changed."""
    device = accelerator.current()
    if device is None:
        return None
    return {"type": device.type, "index": device.index, "state": _seeded(device, seed), "others": {}}


def fits_device(states: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether the states of a process's generators, from a checkpoint, have one for the device of a run."""
    stored = state_in(states)
    return device.type == "cpu" or (stored is not None and stored["type"] == device.type)


def state_in(states: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the device's part of the states of a process's generators, as a checkpoint of any time holds them."""
    if "device" in states:
        found: dict[str, Any] | None = states["device"]
        return found
    by_number = cuda.earlier_generators(states)
    if not by_number:
        return None
    device = accelerator.current()
    own = device.index if device is not None and device.index < len(by_number) else 0
    drawn = [number for number, state in enumerate(by_number) if cuda.has_drawn(state)]
    if len(drawn) == 1:  # that of the rank which saved it, whatever its number is here
        own = drawn[0]
    others = {str(number): state for number, state in enumerate(by_number) if number != own}
    return {"type": cuda.NAME, "index": own, "state": by_number[own], "others": others}


def check_device_state(state: Any) -> None:
    """Refuse what is no state of an accelerator's generators (ValueError, TypeError), whether it is here or not."""
    if state is None:
        return
    kind, own, others = state["type"], state["state"], state["others"]
    if not isinstance(kind, str) or not isinstance(others, Mapping) or not all(key.isdecimal() for key in others):
        raise TypeError("no kind of device, and states by number")
    device = accelerator.current()
    for each in (own, *others.values()):
        if not isinstance(each, Tensor) or each.dtype != torch.uint8 or each.dim() != 1:
            raise TypeError("no row of bytes")
        if kind == cuda.NAME:
            cuda.check_generator_state(each)
        elif device is not None and device.type == kind:
            torch.Generator(device).set_state(each)


@contextmanager
def forked_generators() -> Iterator[None]:
    """Put torch's generators, the host's and the device's, back after the block."""
    host, device = torch.get_rng_state(), device_state()
    try:
        yield
    finally:
        torch.set_rng_state(host)
        set_device_state(device)


def _seeded(device: torch.device, seed: int) -> Tensor:
    state: Tensor = torch.Generator(device).manual_seed(seed).get_state()
    return state


def _has_drawn(device: torch.device, state: Tensor) -> bool:
    generator = torch.Generator(device)
    generator.set_state(state)
    return not torch.equal(state, _seeded(device, generator.initial_seed()))
