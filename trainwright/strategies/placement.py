"""Placement: moves a module to a device and keeps tied tensors tied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def move(module: nn.Module, device: torch.device, stays: Callable[[Tensor], bool] | None = None) -> None:
    """Move a module to a device in place, except tensors that `stays` selects.

    Tied weights stay tied: torch moves a parameter in place only where the backend allows it (as CUDA does), and otherwise
    creates a new one for each occurrence, as it always does for buffers. Lazy tensors stay lazy.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    kept = []  # keeps the ids unique
    for owner, name, tensor in _tensors(module):
        places.setdefault(id(tensor), []).append((owner, name))
        kept.append(tensor)
    lazy = [(place, tensor) for tensor in kept if is_lazy(tensor) for place in places[id(tensor)][:1]]
    if stays is None:
        module.to(device)
    else:
        module._apply(lambda tensor: tensor if stays(tensor) else tensor.to(device))  # type: ignore[no-untyped-call]
    for (owner, name), tensor in lazy:
        if not is_lazy(getattr(owner, name)):
            kind: Any = type(tensor)
            setattr(owner, name, kind(requires_grad=tensor.requires_grad, device=device, dtype=tensor.dtype))
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
