"""Generators: the states of those on the accelerator, this process's own device first."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainwright.devices import accelerator, cuda


def device_state() -> dict[str, Any] | None:
    """Return the states of the generators that this process draws from on an accelerator; None where it uses none.

    "state" is that of the device it computes on, whatever its number; "others" are those of further devices that it has
    drawn from, by number.
    """
    device = accelerator.current()
    if device is None:
        return None
    module: Any = torch.get_device_module(device)
    others = {}
    for index in range(accelerator.count(device.type)):
        if index != device.index:
            state = module.get_rng_state(index)
            if not torch.equal(state, _seeded(torch.device(device.type, index), torch.initial_seed())):
                others[str(index)] = state
    return {"type": device.type, "state": module.get_rng_state(), "others": others}


def set_device_state(state: Mapping[str, Any] | None) -> None:
    """Put the generators back to what `device_state` returned, on another number of devices and of another number too.

    What is of another kind of device than the one here is left out; so is, with a warning, a further device that is not here.
    """
    here = accelerator.accelerator_type()
    if state is None or state["type"] != here:
        return
    module: Any = torch.get_device_module(here)
    module.set_rng_state(state["state"])
    present = accelerator.count(here)
    gone = [index for index in state["others"] if int(index) >= present]
    for index, other in state["others"].items():
        if index not in gone:
            module.set_rng_state(other, int(index))
    if gone:
        warnings.warn(
            f"the generators of the {here} device(s) {', '.join(gone)} are in the checkpoint, and torch sees {present} here: "
            "what the run draws there, if anything, it draws anew. The generator of its own device was restored.",
            stacklevel=2,
        )


def derived_device_state(seed: int) -> dict[str, Any] | None:
    """Return what `device_state` would return with the device's generator seeded; nothing is changed."""
    device = accelerator.current()
    return None if device is None else {"type": device.type, "state": _seeded(device, seed), "others": {}}


def fits_device(states: Mapping[str, Any]) -> bool:
    """Return whether the states of a process's generators, from a checkpoint, have one for the device that this one uses."""
    device, stored = accelerator.current(), state_in(states)
    return device is None or (stored is not None and stored["type"] == device.type)


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
    others = {str(index): state for index, state in enumerate(by_number) if index != own and _has_drawn(state)}
    return {"type": cuda.NAME, "state": by_number[own], "others": others}


def check_device_state(state: Any) -> None:
    """Refuse what is no state of an accelerator's generators (ValueError, TypeError), whether it is here or not."""
    if state is None:
        return
    kind, own, others = state["type"], state["state"], state["others"]
    if not isinstance(kind, str) or not isinstance(others, Mapping) or not all(key.isdecimal() for key in others):
        raise TypeError("no kind of device, and states by number")
    for each in (own, *others.values()):
        if not isinstance(each, Tensor) or each.dtype != torch.uint8 or each.dim() != 1:
            raise TypeError("no row of bytes")
        if kind == cuda.NAME:
            cuda.check_generator_state(each)
        elif accelerator.is_available(kind):
            torch.Generator(torch.device(kind, 0)).set_state(each)


def _seeded(device: torch.device, seed: int) -> Tensor:
    state: Tensor = torch.Generator(device).manual_seed(seed).get_state()
    return state


def _has_drawn(state: Tensor) -> bool:
    return bool(state[8:].any())


@contextmanager
def forked_generators() -> Iterator[None]:
    """Put torch's generators, the host's and the device's, back after the block."""
    host, device = torch.get_rng_state(), device_state()
    try:
        yield
    finally:
        torch.set_rng_state(host)
        set_device_state(device)
