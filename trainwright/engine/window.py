"""Accumulation windows: which batch ends one, and what its losses are divided by, in the Trainer and in a raw loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.engine.divided_loss import divisor_of, in_float32
from trainwright.engine.engine import Engine
from trainwright.engine.iterations import Iteration, Iterations


class AccumulationWindow:
    """One accumulation window: the batches of one optimizer step.

    It ends after its usual number of batches, or with the data. Its losses are divided by the length that is known at its
    first batch; where it ends earlier than that, its gradients are multiplied by `correction` before the step.
    """

    def __init__(self) -> None:
        self.length = 1
        """Batches of this window, as far as is known at its first."""
        self.is_at_end = True
        """Whether the current batch ends the window."""
        self.has_gradients = False
        """Whether gradients wait for the step."""
        self.is_open = False
        """Whether gradients wait, or batches of this window are still to come."""
        self._planned = 1
        self._divisor: float | None = None
        """What the losses of this window are divided by; None before the first."""
        self.is_at_start = True
        """Whether the current batch is the window's first."""
        self._position = 0
        """Batches that have ended."""
        self._count = 1
        """Batches, the current one included."""

    def begin_batch(self, usual_length: int, batches_left: int | None, is_last: bool) -> None:
        """Begin a batch of this window, or of the next.

        Args:
            usual_length: batches of a window that is not cut short.
            batches_left: what the data still has, this batch included; None where that is not known.
            is_last: whether this batch is the data's last.
        """
        self.is_at_start = self._position == 0
        if self.is_at_start:
            self._divisor, self._planned, self.length = None, usual_length, usual_length
            if batches_left is not None:
                self.length = max(1, min(usual_length, batches_left))
        self._count = self._position + 1
        self.is_at_end = is_last or self._count >= self._planned

    def end_batch(self) -> None:
        """End the current batch, and the window with its last."""
        if self.is_at_end:
            self.has_gradients = self.is_open = False
            self._position = 0
        else:
            self._position, self.is_open = self._count, True

    def hold_gradients(self) -> None:
        """Note that gradients wait for the step."""
        self.has_gradients = self.is_open = True

    def drop(self) -> None:
        """Begin a new window with the next batch: the gradients of this one are gone, or have been stepped with."""
        self.has_gradients = self.is_open = False
        self._position, self._count = 0, 1
        self.is_at_start = self.is_at_end = True

    def divide(self, loss: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a loss as it goes backward in this window; `dtype` is that of the step's own loss, where it differs."""
        if self._divisor is None:
            self._divisor = divisor_of(self.length, dtype or loss.dtype)
        return in_float32(loss) / self._divisor

    @property
    def correction(self) -> float:
        """Return what the gradients are still to be multiplied by.

        The window may end earlier than its losses were divided for, or its length be inexact in their dtype.
        """
        return (self._divisor or self.length) / self._count if self.is_at_end else 1.0


class ModelWindow(AccumulationWindow, AbstractContextManager[None]):
    """The window of one set of models in a raw loop: entered once for each of its batches.

    Where the loop has left its loader early, the next batch begins a new window, without the gradients of the old one.

    Args:
        windows: all windows of the loop; this one is the one at hand from its entry on.
        models: whose window it is; empty for all.
    """

    def __init__(self, windows: AccumulationWindows, models: tuple[nn.Module, ...] = ()) -> None:
        super().__init__()
        self._windows, self._models = windows, models
        self._iteration: Iteration | None = None
        """The pass over a loader that it began in."""
        self._corrected: set[int] = set()

    def __enter__(self) -> None:
        windows = self._windows
        windows.at_hand = self
        if windows.usual_length == 1 and self._position == 0:
            self.begin_batch(1, None, True)
            self._corrected.clear()
            return
        iteration, is_certain = windows.iterations.at_hand()
        loader = None if iteration is None else iteration.loader
        if self._position and self._iteration is not None and self._iteration.is_left:
            self.drop()
            windows.drop_gradients(self._models)
        if self._position == 0:
            self._iteration = iteration
            self._corrected.clear()
        left = loader.batches_left if loader is not None and is_certain else None
        self.begin_batch(windows.usual_length, left, loader is not None and loader.is_at_end)
        self.end_batch()  # a user may leave the block by an exception, or a break
        windows.engine.sync_gradients(self.is_at_end)

    def __exit__(self, *error: object) -> None:
        return None

    def correct(self, optimizer: Optimizer) -> float:
        """Return what an optimizer's gradients are still to be multiplied with in this window, and take it as done."""
        correction = self.correction
        if correction == 1.0 or id(optimizer) in self._corrected:
            return 1.0
        self._corrected.add(id(optimizer))
        return correction


class AccumulationWindows:
    """The windows of a loop: one for each set of models that `of` is asked for, all of one usual length.

    Args:
        engine: is told which batch ends a window.
        usual_length: batches of a window that is not cut short.
        iterations: which loader the batch at hand is from.
        drop_gradients: clears what waits for a step of these models; of all where none is given.
    """

    def __init__(
        self,
        engine: Engine,
        usual_length: int,
        iterations: Iterations,
        drop_gradients: Callable[[tuple[nn.Module, ...]], None],
    ) -> None:
        self.engine, self.iterations, self.drop_gradients = engine, iterations, drop_gradients
        self.usual_length = usual_length
        self.backwards = 0
        """How many losses were sent backward so far."""
        self.reset()

    def reset(self) -> None:
        """Begin with the first batch of a window."""
        self._windows: dict[tuple[nn.Module, ...], ModelWindow] = {}
        self.at_hand = ModelWindow(self)
        """The window that was entered last."""
        self.has_gradients = False
        """Whether gradients wait for a step."""

    @property
    def is_open(self) -> bool:
        """Return whether gradients wait, or a window has begun and not ended."""
        return self.has_gradients or any(each.is_open for each in self._windows.values())

    def of(self, models: tuple[nn.Module, ...]) -> ModelWindow:
        """Return the window of these models."""
        window = self._windows.get(models)
        if window is None:
            window = self._windows[models] = ModelWindow(self, models)
        return window

    def set_length(self, length: int) -> None:
        """Give the windows that begin from now on another usual length."""
        self.usual_length = length
        if length == 1 and not any(each.is_open for each in self._windows.values()):
            self.engine.sync_gradients(True)

    def divide(self, loss: Tensor) -> Tensor:
        """Return a loss as it goes backward now, in the window at hand."""
        self.backwards += 1
        self.has_gradients = True
        return loss if self.at_hand.length == 1 else self.at_hand.divide(loss)
