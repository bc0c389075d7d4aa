"""Transfer: moves batches of any structure to a device, on a GPU while the previous batch trains (`Prefetcher`)."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainwright.devices.abilities import computes_in
from trainwright.value_kinds import with_values


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with all tensors, and all objects with a `to(device)`, on the device.

    Other leaves are unchanged. Copies from pinned memory do not block. Copies to the host block, since it may read them at
    once.

    Raises:
        TypeError: the batch has a float64 tensor, and the device has no float64.
    """

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.dtype == torch.float64 and not computes_in(device.type, torch.float64):
                raise TypeError(
                    f"the batch has a float64 tensor of shape {tuple(leaf.shape)}, but {device} has no float64. Let the "
                    "dataset return torch.float32 (Python's and numpy's floats become float64)."
                )
            return leaf.to(device, non_blocking=device.type != "cpu")
        return leaf.to(device) if callable(getattr(leaf, "to", None)) and not isinstance(leaf, type) else leaf

    return map_leaves(moved, batch)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a nested structure (mappings, lists, tuples, named tuples) with the function applied to every leaf."""
    if callable(getattr(value, "to", None)):
        return function(value)
    if isinstance(value, Mapping):
        return with_values(value, {key: map_leaves(function, item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, item) for item in value))
    if isinstance(value, list) and type(value) is not list:
        clone = copy.copy(value)  # the class may take other arguments, and the object may have attributes
        clone[:] = [map_leaves(function, item) for item in value]
        return clone
    if isinstance(value, (list, tuple)):
        return type(value)(map_leaves(function, item) for item in value)
    return function(value)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a nested structure with the function applied to every tensor in it."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def pinned(batch: Any) -> Any:
    """Return the batch with all CPU tensors, and all objects with a `pin_memory()`, in pinned memory."""

    def pin(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.pin_memory() if leaf.device.type == "cpu" and leaf.layout == torch.strided else leaf
        return leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else leaf

    return map_leaves(pin, batch)


class CopyStream:
    """A side stream for copies to a device, so that copies overlap with training."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.Stream(device)

    def pin(self, batch: Any) -> Any:
        return pinned(batch)  # copies from memory that is not pinned block the host

    @contextmanager
    def copying(self) -> Iterator[None]:
        with self._side:
            yield

    def mark(self) -> Any:
        """Return an event that fires when all copies so far are done."""
        return self._side.record_event()

    def wait_for(self, mark: Any) -> None:
        # Only the training's stream waits, not the host.
        torch.accelerator.current_stream(self._device).wait_event(mark)

    def keep(self, leaf: Any) -> None:
        """Reserve a copied tensor's memory until the training's stream no longer uses the tensor."""
        leaf.record_stream(torch.accelerator.current_stream(self._device))

    def wait_for_training(self) -> None:
        """Make the following copies wait for the training's stream. Call it outside `copying`."""
        self._side.wait_stream(torch.accelerator.current_stream(self._device))


class Prefetcher:
    """Copies batches to a device from pinned memory on a side stream, one batch ahead of the training.

    With `ahead` the next batch's copy starts before this batch is yielded. Set it only if reading does not use this process's
    random number generators (the loader's `may_read_ahead`). Otherwise a resumed run would get other random numbers.
    """

    def __init__(
        self,
        batches: Iterable[tuple[Any, bool]],
        device: torch.device,
        *,
        ahead: bool,
        transfer: Callable[[Any, torch.device], Any] = to_device,
        stream: CopyStream | None = None,
    ) -> None:
        self.batches, self.device, self.ahead = batches, device, ahead
        self._transfer = transfer
        self._stream = CopyStream(device) if stream is None else stream

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        batches = iter(self.batches)
        # A batch is removed when it is yielded, so that its memory is not used any longer.
        sent: deque[tuple[Any, Any, bool]] = deque()
        try:
            for batch, is_last in batches:
                sent.append((*self._sent(batch), is_last))
                if len(sent) > self.ahead:
                    yield self._received(*sent.popleft())
            while sent:
                yield self._received(*sent.popleft())
        finally:
            close = getattr(batches, "close", None)
            if callable(close):
                close()

    def _sent(self, batch: Any) -> tuple[Any, Any]:
        """Start a batch's copy, and return the copy and the event that fires when it is done."""
        stream = self._stream
        batch = stream.pin(batch)
        if _has_unrecorded_memory(batch):
            stream.wait_for_training()  # the copy may get memory that the training still reads
        with stream.copying():
            moved = self._transfer(batch, self.device)
            return moved, stream.mark()

    def _received(self, moved: Any, mark: Any, is_last: bool) -> tuple[Any, bool]:
        self._stream.wait_for(mark)

        def keep(leaf: Any) -> Any:
            if callable(getattr(leaf, "record_stream", None)):
                self._stream.keep(leaf)
            return leaf

        map_leaves(keep, moved)
        return moved, is_last


def _has_unrecorded_memory(batch: Any) -> bool:
    """Return whether an object in the batch has a `to`, but no `record_stream` to reserve its memory."""
    leaves: list[Any] = []

    def look(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    map_leaves(look, batch)
    movable = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, type)) and callable(getattr(leaf, "to", None))]
    return any(not callable(getattr(leaf, "record_stream", None)) for leaf in movable)
