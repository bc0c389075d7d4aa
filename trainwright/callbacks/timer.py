"""Timer: measures the stages of a run, and stops training after a given time."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback
from trainwright.duration import to_seconds
from trainwright.rank_zero import say

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

STAGES = ("train", "validate", "test", "predict", "sanity_check")


class Timer(Callback):
    """Measures every stage and, with a duration, stops training when the time is up.

    Args:
        duration: "DD:HH:MM:SS", a timedelta, or a dict of timedelta's arguments. None only measures.
        interval: "step" stops all ranks after the same optimizer step, "epoch" at the end of an epoch.
        verbose: print on rank 0 that the time is up.

    Time counts from the first batch, including validation within fit and the time before a resume. `time_elapsed`,
    `time_remaining`, `start_time` and `end_time` are in seconds, for "train", "validate", "test", "predict" or
    "sanity_check".

    Raises:
        TypeError, ValueError: the duration is not one, or the interval is unknown.

    >>> timer = tw.Timer(duration="00:08:00:00")
    >>> tw.Trainer(callbacks=timer, max_epochs=1, enable_model_summary=False).fit(module, loader)
    >>> timer.time_elapsed("train") + timer.time_remaining()
    28800.0
    """

    reads_outputs = False

    @refuses_unknown
    def __init__(
        self, duration: str | timedelta | dict[str, float] | None = None, interval: str = "step", verbose: bool = True
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ValueError(f"interval={interval!r} is unknown; choose from step, epoch.")
        self._duration = to_seconds(duration, allows_zero=True) if duration is not None else None
        self._interval, self._verbose = interval, verbose
        self._start: dict[str, float | None] = dict.fromkeys(STAGES)
        self._end: dict[str, float | None] = dict.fromkeys(STAGES)
        self._offset = 0.0
        self._is_over = False

    def start_time(self, stage: str = "train") -> float | None:
        """Return when a stage started, by time.monotonic(), or None if it has not."""
        return self._start[stage]

    def end_time(self, stage: str = "train") -> float | None:
        """Return when a stage ended, by time.monotonic(), or None if it has not."""
        return self._end[stage]

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds that a stage has taken so far, in training also before a resume."""
        start, end = self.start_time(stage), self.end_time(stage)
        before = self._offset if stage == "train" else 0.0
        if start is None:
            return before
        return before + (end if end is not None else time.monotonic()) - start

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds that are left, or None without a duration."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._offset = float(state.get("time_elapsed", {}).get("train", 0.0))

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        if stage == "fit":
            self._offset, self._is_over = 0.0, False
            self._start["train"] = self._end["train"] = None

    def has_requested_stop(self, trainer: AnyTrainer, module: Module) -> bool:
        return self._is_over

    def on_resume_start(self, trainer: AnyTrainer, module: Module) -> None:
        self._decide(trainer)  # the run may have used up its time before

    def on_train_start(self, trainer: AnyTrainer, module: Module) -> None:
        self._begin("train")
        if not self._is_over:
            self._decide(trainer)  # its state may have been loaded without a checkpoint of the run

    def on_train_batch_end(self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._interval == "step" and not self._is_over and self._is_used_up():
            # Not should_stop: the clocks of the ranks differ, and all stop at one step.
            trainer.stop_soon()
            self._note_end(trainer)

    def on_train_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        if self._interval == "epoch":
            self._decide(trainer)

    def on_train_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._end["train"] = time.monotonic()

    def on_sanity_check_start(self, trainer: AnyTrainer, module: Module) -> None:
        self._begin("sanity_check")

    def on_sanity_check_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._end["sanity_check"] = time.monotonic()

    def on_validation_start(self, trainer: AnyTrainer, module: Module) -> None:
        if not trainer.sanity_checking:
            self._begin("validate")

    def on_validation_end(self, trainer: AnyTrainer, module: Module) -> None:
        if not trainer.sanity_checking:
            self._end["validate"] = time.monotonic()

    def on_test_start(self, trainer: AnyTrainer, module: Module) -> None:
        self._begin("test")

    def on_test_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._end["test"] = time.monotonic()

    def on_predict_start(self, trainer: AnyTrainer, module: Module) -> None:
        self._begin("predict")

    def on_predict_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._end["predict"] = time.monotonic()

    def _begin(self, stage: str) -> None:
        self._start[stage], self._end[stage] = time.monotonic(), None

    def _is_used_up(self) -> bool:
        return self._duration is not None and self.time_elapsed() >= self._duration

    def _decide(self, trainer: TrainerProtocol) -> None:
        """Stop the run here if rank 0's time is up. Collective with a duration."""
        if self._duration is not None and trainer.engine.ranks.decide(self._is_used_up, "the look of Timer"):
            trainer.should_stop = True
            self._note_end(trainer)

    def _note_end(self, trainer: TrainerProtocol) -> None:
        self._is_over = True
        if self._verbose and trainer.is_global_zero:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            say(f"training has reached its time limit after {elapsed}; stopping.")
