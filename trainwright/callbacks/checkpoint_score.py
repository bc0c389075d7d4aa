"""The metric that checkpoints are judged by, as it is read at a save."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer


class MonitoredScore:
    """Reads the metric that a ModelCheckpoint monitors, on rank 0: a step's value is its own. It warns once of each trouble.

    Args:
        monitor: the metric's name; None where nothing is monitored.
    """

    def __init__(self, monitor: str | None) -> None:
        self.monitor = monitor
        self._has_warned = self._has_warned_of_value = False

    def read(self, trainer: Trainer, has_validated: bool) -> float | None:
        """Return its value; NaN where it is not logged yet and need not be.

        Raises:
            ValueError: it was not logged and should have been; the text says what was.
        """
        if self.monitor is None:
            return None
        if self.monitor in trainer.callback_metrics:
            return float(trainer.monitored(self.monitor, "ModelCheckpoint"))
        has_come = has_validated if trainer.enable_validation else trainer.state.epoch_ended
        if has_come and trainer.state.epoch_ended:
            return float(trainer.monitored(self.monitor, "ModelCheckpoint"))  # which says what there is
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"ModelCheckpoint is to save by {self.monitor!r}, which was not logged yet; what is saved before it is does "
                "not count among the best, and the newest of it alone is kept.",
                stacklevel=2,
            )
        return math.nan

    def warn_of_value(self, trainer: Trainer, score: float | None) -> None:
        """Say that the value is not finite."""
        if not self._has_warned_of_value and self.monitor in trainer.callback_metrics:
            self._has_warned_of_value = True
            warnings.warn(
                f"ModelCheckpoint is to save by {self.monitor!r}, which is {score}, not finite; until it is finite, the newest "
                "checkpoint alone is kept, to resume from, and there is no best one.",
                stacklevel=2,
            )
