"""The accumulation windows of a loop of one's own: which batch ends one, and what its losses are divided by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.engine.divided_loss import divisor_of, in_float32
from trainwright.engine.engine import Engine
from trainwright.engine.iterations import Iteration, Iterations


class AccumulationWindow(AbstractContextManager[None]):
    """The window of one set of models: entered once for each of its batches.

    It ends after its usual number of batches, or with the loader. Where the loader was left before, the next batch begins a
    new window, without the gradients of the old one.

    Args:
        windows: all windows of the loop; this one is the one at hand from its entry on.
        models: whose window it is; empty for all.
    """

    def __init__(self, windows: AccumulationWindows, models: tuple[nn.Module, ...] = ()) -> None:
        self.length = 1
        """Batches of this window, as they are planned."""
        self.is_at_end = True
        """Whether the batch at hand ends its window."""
        self.correction = 1.0
        """What gradients are to be multiplied with: a window may end earlier than was to be seen at its beginning."""
        self._windows, self._models = windows, models
        self._planned = 1
        self._divisor: float | None = None
        """What the losses of this window are divided by; None before the first."""
        self._place = 0
        self._iteration: Iteration | None = None
        """The pass over a loader that it began in."""
        self._corrected: set[int] = set()

    def __enter__(self) -> None:
        windows = self._windows
        windows.at_hand = self
        if windows.usual_length == 1 and self._place == 0:
            self.length, self.is_at_end, self.correction, self._divisor = 1, True, 1.0, None
            return
        iteration, is_certain = windows.iterations.at_hand()
        loader = None if iteration is None else iteration.loader
        if self._place and self._iteration is not None and self._iteration.is_left:
            self._place = 0
            windows.drop_gradients(self._models)
        if self._place == 0:
            self._iteration = iteration
            self.correction, self._divisor = 1.0, None
            self._corrected.clear()
            self._planned = self.length = windows.usual_length
            left = loader.batches_left if loader is not None and is_certain else None
            if left is not None:
                self.length = max(1, min(self.length, left))
        self._place += 1
        self.is_at_end = self._place >= self._planned or (loader is not None and loader.is_at_end)
        if self.is_at_end:
            # What came before was divided by a length that turns out to be another one.
            self.correction = self.length / self._place
            self._place = 0
        windows.engine.sync_gradients(self.is_at_end)

    def __exit__(self, *error: object) -> None:
        return None

    @property
    def is_open(self) -> bool:
        """Return whether it has begun, and its last batch has not come yet."""
        return self._place > 0

    def correct(self, optimizer: Optimizer) -> float:
        """Return what an optimizer's gradients are still to be multiplied with in this window, and take it as done."""
        correction = self.correction * ((self._divisor or self.length) / self.length)
        if correction == 1.0 or id(optimizer) in self._corrected:
            return 1.0
        self._corrected.add(id(optimizer))
        return correction

    def divide(self, loss: Tensor) -> Tensor:
        """Return a loss as it goes backward in this window."""
        if self._divisor is None:
            self._divisor = divisor_of(self.length, loss.dtype)
        return in_float32(loss) / self._divisor


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
        self._windows: dict[tuple[nn.Module, ...], AccumulationWindow] = {}
        self.at_hand = AccumulationWindow(self)
        """The window that was entered last."""
        self.has_gradients = False
        """Whether gradients wait for a step."""

    @property
    def is_open(self) -> bool:
        """Return whether gradients wait, or a window has begun and not ended."""
        return self.has_gradients or any(each.is_open for each in self._windows.values())

    def of(self, models: tuple[nn.Module, ...]) -> AccumulationWindow:
        """Return the window of these models."""
        window = self._windows.get(models)
        if window is None:
            window = self._windows[models] = AccumulationWindow(self, models)
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
