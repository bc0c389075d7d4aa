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
        """Return its value; NaN where it is not logged yet and need not be, or where other weights than the present got it.

        Raises:
            ValueError: it was not logged and should have been; the text says what was.
        """
        if self.monitor is None:
            return None
        if self.monitor in trainer.callback_metrics:
            value = float(trainer.monitored(self.monitor, "ModelCheckpoint"))
            return math.nan if trainer.logbook.is_outdated(self.monitor) else value
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

    def is_to_come(self, trainer: Trainer) -> bool:
        """Return whether the next validation gives the present weights their score, or may: nothing else has given one."""
        if self.monitor is None or not trainer.enable_validation:
            return False
        return self.monitor not in trainer.callback_metrics or trainer.logbook.is_outdated(self.monitor)

    def warn_of_value(self, trainer: Trainer, score: float | None, is_awaited: bool) -> None:
        """Say that the value is not finite, or that other weights got it and no validation of these is awaited."""
        if self._has_warned_of_value or is_awaited or self.monitor not in trainer.callback_metrics:
            return
        self._has_warned_of_value = True
        if trainer.logbook.is_outdated(self.monitor):
            warnings.warn(
                f"ModelCheckpoint is to save by {self.monitor!r} where the latest validation was of earlier weights; such a "
                "checkpoint does not count among the best, and the newest of them alone is kept. Save after validations "
                "(leave save_on_train_epoch_end out), or validate where it saves.",
                stacklevel=2,
            )
        else:
            warnings.warn(
                f"ModelCheckpoint is to save by {self.monitor!r}, which is {score}, not finite; until it is finite, the newest "
                "checkpoint alone is kept, to resume from, and there is no best one.",
                stacklevel=2,
            )
