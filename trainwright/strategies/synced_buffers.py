"""Synced buffers: every training step starts with rank 0's buffers, so that all ranks train one model."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

BROADCAST_BYTES = 32 * 1024 * 1024


class SyncedBuffers:
    """Broadcasts rank 0's buffers before the first training forward of each window, for modules that train parameters.

    Not before every forward: two forwards may share one backward, which fails if a buffer changed in between.
    """

    def __init__(self) -> None:
        self._slots: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        self._due: set[nn.Module] = set()

    def track(self, module: nn.Module, left_out: Collection[str] = ()) -> None:
        """Broadcast a module's buffers from its next step on, except those in `left_out`; call again after changes."""
        # Owners and names, not tensors: a step may replace a buffer.
        slots = [
            (owner, name)
            for path, owner in module.named_modules()
            for name in owner._buffers
            if f"{path}.{name}".removeprefix(".") not in left_out
        ]
        self._slots.pop(module, None)
        self._due.discard(module)
        if slots and any(parameter.requires_grad for parameter in module.parameters()):
            self._slots[module] = slots
            self._due.add(module)

    def begin_step(self, module: nn.Module) -> None:
        """Broadcast if due. Collective: call before each forward; it does nothing without gradients."""
        if module not in self._due or not torch.is_grad_enabled():
            return
        self._due.discard(module)
        present = (owner._buffers.get(name) for owner, name in self._slots[module])
        broadcast_tensors(each for each in present if isinstance(each, Tensor))

    def end_window(self) -> None:
        """Broadcast before the next step."""
        self._due.update(self._slots)

    def clear(self) -> None:
        self._slots.clear()
        self._due.clear()


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Replace tensors by rank 0's, in place. Collective: call on every rank."""
    present = [tensor.detach() for tensor in tensors if not is_lazy(tensor) and tensor.numel() > 0]
    if present and dist.is_initialized() and dist.get_world_size() > 1:
        group = dist.group.WORLD
        assert group is not None
        dist._broadcast_coalesced(group, present, BROADCAST_BYTES, 0)  # type: ignore[attr-defined]
