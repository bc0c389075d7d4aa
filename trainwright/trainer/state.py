"""State: where a run stands, in one object that a checkpoint holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class TrainerState:
    """The counters of a run.

    `epoch` counts finished epochs, so during an epoch it is that epoch's number from 0. `batch` counts the batches that
    this rank has finished in the epoch, `total_batches` those of the run, `step` the optimizer steps of the run (each
    optimizer's under manual optimization), `batches_that_stepped` the batches after which a step was made: the loggers' x
    axis. `validations` counts the validations of the run, and `validated_at` is `total_batches` as it was at the latest.
    `schedulers_stepped` is True once an epoch's schedulers have stepped, but for those that follow a metric: its validation
    may be still to come. `epoch_ended` is True once the epoch has no batch and no validation to come, while its number still
    stands.
    """

    epoch: int = 0
    batch: int = 0
    total_batches: int = 0
    step: int = 0
    batches_that_stepped: int = 0
    skipped_steps: int = 0
    validations: int = 0
    validated_at: int = -1
    schedulers_stepped: bool = False
    epoch_ended: bool = False

    def state_dict(self) -> dict[str, int]:
        """Return the counters as plain data."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the counters from plain data; one that an older version did not know keeps its value."""
        for field in fields(self):
            if field.name in state:
                setattr(self, field.name, int(state[field.name]))
        if self.epoch_ended:
            self.next_epoch()

    def next_epoch(self) -> None:
        """Go on to the next epoch."""
        self.epoch, self.batch, self.epoch_ended, self.schedulers_stepped = self.epoch + 1, 0, False, False
