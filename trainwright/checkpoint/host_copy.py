"""A host copy of what a rank will write, so that training can change the originals while a thread writes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainwright.checkpoint.shards import check_storable
from trainwright.checkpoint.tensors import Piece, tied_groups
from trainwright.devices.abilities import has_pinned_memory
from trainwright.devices.accelerator import HOST
from trainwright.devices.locked_memory import LockedMemory

ALIGNMENT = 64


class HostMemory:
    """Host memory for the pieces of one checkpoint, kept for the next save because fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._locked: LockedMemory | None = None

    def release(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._locked is not None:
            self._locked.release()
            self._locked = None

    def copy(self, parts: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
        """Return the pieces with copies of their tensors; tied ones stay tied. The next call overwrites these copies."""
        groups = [group for pieces in parts for group in tied_groups(pieces)]
        for group in groups:
            check_storable(group[0].name, group[0].tensor)
        copied: dict[int, Piece] = {}
        devices = {group[0].tensor.device for group in groups}
        with torch.inference_mode(False), torch.no_grad():  # a save may happen during a validation
            self._reserve(sum(_room(group[0].tensor) for group in groups), {device.type for device in devices})
            offset = 0
            for group in groups:
                tensor = group[0].tensor
                room = self._memory[offset : offset + tensor.nbytes]
                copy = room.view(tensor.dtype).view(tensor.shape) if tensor.numel() else tensor.new_empty(tensor.shape)
                copy.copy_(tensor, non_blocking=self._locked is not None)  # MPS does not wait for other memory either
                offset += _room(tensor)
                copied.update((id(piece), replace(piece, tensor=copy)) for piece in group)
        if self._locked is not None:
            for device in devices - {HOST}:
                torch.accelerator.synchronize(device)
        return [[copied[id(piece)] for piece in pieces] for pieces in parts]

    def _reserve(self, size: int, device_types: Collection[str]) -> None:
        locking = next((each for each in sorted(device_types) if has_pinned_memory(each)), None)
        if size > self._memory.numel() or (locking is None) != (self._locked is None):
            self.release()  # first, so that both are never allocated at once
            more = size // 16 + (1 << 20)  # metrics grow a little from save to save
            if locking is None:
                self._memory = torch.empty(size + more, dtype=torch.uint8)
            else:
                self._locked = LockedMemory(size + more, locking)
                self._memory = self._locked.tensor


def _room(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
