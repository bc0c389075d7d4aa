"""Placement: a module onto a device, with what its parts share still shared there."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device in place; a tensor that stands at several places of it stays one.

    torch swaps a parameter's memory where the host and the device allow it, as CUDA does, and makes a new parameter for each
    place where they do not, as for backends outside torch; of buffers it makes new ones always. Tied weights would be tied no
    longer, and trained apart.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    kept = []  # an id is its tensor's while that lives
    for owner, name, tensor in _tensors(module):
        places.setdefault(id(tensor), []).append((owner, name))
        kept.append(tensor)
    module.to(device)
    for first, *others in places.values():
        moved = getattr(*first)
        for owner, name in others:
            if getattr(owner, name) is not moved:
                setattr(owner, name, moved)


def _tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    yield owner, name, tensor
