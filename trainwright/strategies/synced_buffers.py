"""Shared buffers: rank 0's on every rank where a training step begins, so that what steps write and read stays one model."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

BROADCAST_BYTES = 32 * 1024 * 1024


class SyncedBuffers:
    """Sends rank 0's buffers before the first training forward after a backward that ended a window.

    A forward is not always followed by a backward at once (two forwards of one loss), and what is changed in between would be
    missing in that backward. Nothing is sent for modules without buffers, or without parameters that are trained.
    """

    def __init__(self) -> None:
        self._slots: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        self._due: set[nn.Module] = set()
        self.ends_window = True
        """Whether the backward that follows ends an accumulation window."""

    def track(self, module: nn.Module, left_out: Collection[str] = ()) -> None:
        """Send this module's buffers from its next step on, but for those named; called again, as they are by then."""
        # Places, not tensors: a step may put another tensor there.
        slots = [
            (owner, name)
            for path, owner in module.named_modules()
            for name in owner._buffers
            if (f"{path}.{name}" if path else name) not in left_out
        ]
        self._slots.pop(module, None)
        self._due.discard(module)
        if slots and any(parameter.requires_grad for parameter in module.parameters()):
            self._slots[module] = slots
            self._due.add(module)

    def begin_step(self, module: nn.Module) -> None:
        """Send where it is due. Collective: call before each forward; one without gradients is left out."""
        if module not in self._due or not torch.is_grad_enabled():
            return
        self._due.discard(module)
        present = (owner._buffers.get(name) for owner, name in self._slots[module])
        broadcast_tensors(each for each in present if isinstance(each, Tensor) and not is_lazy(each))

    def end_backward(self) -> None:
        """Take note of a backward."""
        if self.ends_window:
            self._due.update(self._slots)

    def clear(self) -> None:
        """Follow no module any more."""
        self._slots.clear()
        self._due.clear()
        self.ends_window = True


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Give every rank rank 0's values, in place. Collective: call on every rank."""
    present = [tensor.detach() for tensor in tensors if tensor.numel() > 0]
    if present and dist.is_initialized() and dist.get_world_size() > 1:
        group = dist.group.WORLD
        assert group is not None
        dist._broadcast_coalesced(group, present, BROADCAST_BYTES, 0)  # type: ignore[attr-defined]
