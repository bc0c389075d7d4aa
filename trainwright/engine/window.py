"""The accumulation window of a loop of one's own: which batch ends it, and what its losses are divided by."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch.optim import Optimizer

from trainwright.engine.engine import Engine
from trainwright.engine.prepared_loader import PreparedLoader


class AccumulationWindow(AbstractContextManager[None]):
    """Entered once for each batch; a window ends after its usual number of batches, or with the loader.

    Args:
        engine: is told which batch ends a window.
        usual_length: batches of a window that is not cut short.
        active: the loaders that are being iterated, the innermost last.
    """

    def __init__(self, engine: Engine, usual_length: int, active: Sequence[PreparedLoader]) -> None:
        self.usual_length = usual_length
        self._engine, self._active = engine, active
        self._corrected: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Begin with the first batch of a window."""
        self.length = 1
        """What the losses of this window are divided by."""
        self.is_at_end = True
        """Whether the batch at hand ends its window."""
        self.has_gradients = False
        """Whether gradients wait for a step."""
        self._place = 0
        self.correction = 1.0
        """What gradients are to be multiplied with: a window that ended early was divided by the usual length."""

    @property
    def may_clear(self) -> bool:
        """Return whether gradients may be cleared: those that no step has used yet are kept until the window ends."""
        return self.usual_length == 1 or not self.has_gradients

    def __enter__(self) -> None:
        if self.usual_length == 1:
            return
        loader = self._active[-1] if self._active else None
        if self._place == 0:
            self.correction = 1.0
            self._corrected.clear()
            left = loader.batches_left if loader is not None else None
            self.length = self.usual_length if left is None else max(1, min(self.usual_length, left))
        self.is_at_end = self._place == self.usual_length - 1 or (loader is not None and loader.is_at_end)
        if self.is_at_end and loader is not None and loader.batches_left is None:
            # It was divided by the usual length before its end was known.
            self.correction = self.usual_length / (self._place + 1)
        self._engine.sync_gradients(self.is_at_end)
        self._place = 0 if self.is_at_end else self._place + 1

    def __exit__(self, *error: object) -> None:
        return None

    def correct(self, optimizer: Optimizer) -> float:
        """Return what an optimizer's gradients are still to be multiplied with in this window, and take it as done."""
        if self.correction == 1.0 or id(optimizer) in self._corrected:
            return 1.0
        self._corrected.add(id(optimizer))
        return self.correction
