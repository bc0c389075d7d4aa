"""Generators: the states of those on the accelerator's devices, by number, and which of them is a process's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainwright.devices import accelerator, cuda

NAMES = frozenset({"python", "numpy", "torch"})
"""The generators on the host: states with these names are those of a process's generators."""


def is_generator_state(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() >= NAMES


def device_state() -> dict[str, Any] | None:
    """Return the states of the accelerator's generators; None where this process uses none.

    "state" is that of the current device, whose number is "index"; "others" are those of the further devices that torch
    sees, by number: a process may draw on them too.
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
    """Put the generators back by their numbers, whichever device is current now; see `taken_over` for another process's.

    What is of another kind of device than the one in use is left out, and so are numbers that torch does not see.
    """
    device = accelerator.current()
    if state is None or device is None or state["type"] != device.type:
        return
    module: Any = torch.get_device_module(device)
    present = accelerator.count(device.type)
    for number, each in {state["index"]: state["state"], **state["others"]}.items():
        if int(number) == device.index:
            module.set_rng_state(each)
        elif int(number) < present:
            module.set_rng_state(each, int(number))


def owned(states: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the states with that of a device, on which the process computes, as its own: another may have been current."""
    state = state_in(states)
    if state is None or state["type"] != device.type or state["index"] == device.index:
        return dict(states)
    others = {**state["others"], str(state["index"]): state["state"]}
    own = others.pop(str(device.index))
    return {**states, "device": {"type": device.type, "index": device.index, "state": own, "others": others}}


def taken_over(states: Mapping[str, Any], device: torch.device, seed: int) -> dict[str, Any]:
    """Return the states from a checkpoint as a process on a device continues with them: its own there, others by number.

    Where they hold none for this kind of device, its generator starts from the seed: else it would draw once more what the
    run has drawn from its own seed on.
    """
    if device.type == "cpu":
        return dict(states)
    state = state_in(states, device)
    if state is None or state["type"] != device.type:
        started = torch.Generator(device).manual_seed(seed).get_state()
        state = {"type": device.type, "index": device.index, "state": started, "others": {}}
    others = {number: each for number, each in state["others"].items() if int(number) != device.index}
    return {**states, "device": {**state, "index": device.index, "others": others}}


def lost_devices(states: Mapping[str, Any], device: torch.device) -> list[str]:
    """Return the numbers of further devices that a checkpoint's process has drawn on and one on a device cannot put back."""
    state = state_in(states, device)
    if state is None or state["type"] != device.type:
        return []
    present = accelerator.count(device.type)
    gone = [number for number in state["others"] if int(number) == device.index or int(number) >= present]
    return [number for number in gone if _has_drawn(device, state["others"][number])]


def state_in(states: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any] | None:
    """Return the device's part of the states of a process's generators, as a checkpoint of any version holds them.

    Those of earlier checkpoints do not say which device was their process's own: on a machine with as many devices it is taken
    for the reading process's `device`.
    """
    if "device" in states:
        found: dict[str, Any] | None = states["device"]
        return found
    by_number = cuda.earlier_generators(states)
    if not by_number:
        return None
    own = device.index if device is not None and device.type == cuda.NAME and device.index < len(by_number) else 0
    drawn = [number for number, state in enumerate(by_number) if cuda.has_drawn(state)]
    # The one that has drawn is the process's own, whatever its number, and goes back by its number, too, where it can.
    state = by_number[drawn[0] if len(drawn) == 1 else own]
    if len(drawn) == 1 and len(by_number) != accelerator.count(cuda.NAME):
        own = drawn[0]
    others = {str(number): each for number, each in enumerate(by_number) if number != own}
    return {"type": cuda.NAME, "index": own, "state": state, "others": others}


def check_device_state(state: Any) -> None:
    """Refuse an invalid state of an accelerator's generators (ValueError, TypeError), whether it is present or not."""
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


def _has_drawn(device: torch.device, state: Tensor) -> bool:
    generator = torch.Generator(device)
    generator.set_state(state)
    return not torch.equal(state, torch.Generator(device).manual_seed(generator.initial_seed()).get_state())
