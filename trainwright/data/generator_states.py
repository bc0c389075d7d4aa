"""Generator states from a checkpoint, checked before they are set: torch and numpy do not check everything themselves."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.devices.generators import check_device_state, is_generator_state, state_in
from trainwright.errors import CheckpointError

DEVICE = "device"
KEY_LENGTH = 624
"""The words of a Mersenne Twister."""


def check_generator_states(value: Any, path: str) -> None:
    """Refuse a checkpoint's plain data if a generator state in it is not valid (CheckpointError)."""
    for state in _states_in([value]):
        for name, check in _CHECKS.items():
            try:
                check(state_in(state) if name == DEVICE else state.get(name))
            except Exception as error:
                raise CheckpointError(
                    f"{path}: the state of the {name} generator is not valid ({error}). Use another checkpoint, or a good "
                    "copy of this one."
                ) from error


def _states_in(value: Any) -> Iterator[Mapping[str, Any]]:
    if is_generator_state(value):
        yield value
    else:
        for each in value.values() if isinstance(value, Mapping) else value:
            if isinstance(each, (Mapping, list, tuple)):
                yield from _states_in(each)


def _check_python(state: Any) -> None:
    version, words, gauss = state
    random.Random().setstate((version, tuple(words), gauss))


def _check_numpy(state: Any) -> None:
    if state is None:
        return
    if isinstance(state, Mapping):
        raise TypeError("a dict, where a tuple was stored")
    kind, key, position, has_gauss, gauss = state
    # Checked by hand: numpy's set_state takes any position, and reads beyond the key at the next draw.
    if kind != "MT19937":
        raise ValueError(f"of the kind {kind!r}")
    if getattr(key, "shape", None) != (KEY_LENGTH,) or str(key.dtype) != "uint32":
        raise ValueError(f"its key is not an array of {KEY_LENGTH} uint32")
    if type(position) is not int or not 0 <= position <= KEY_LENGTH:
        raise ValueError(f"its position is {position!r}")
    if has_gauss not in (0, 1) or not math.isfinite(gauss):
        raise ValueError(f"its next normal number is {gauss!r}")


def _check_torch(state: Any) -> None:
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.dim() != 1:
        raise TypeError("not a row of bytes")
    torch.Generator().set_state(state)


_CHECKS = {"python": _check_python, "numpy": _check_numpy, "torch": _check_torch, DEVICE: check_device_state}
