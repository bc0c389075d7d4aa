"""RungRecorder: the callback by which a rung records a Trainer's fits and evaluations, and the arguments that the rung sets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trainwright.callbacks.base import Callback
from trainwright.data.batch_stream import sample_counts
from trainwright.ladder.recording import Recording, active_recording
from trainwright.rung import ActiveRung, is_aside

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.trainer.trainer import Trainer


class RungRecorder(Callback):
    """Notes the steps, samples and metrics of a Trainer. It has no state, so a copy in another process records there."""

    reads_outputs = False

    def __init__(self, max_steps: int = -1) -> None:
        self._max_steps = max_steps
        """The limit of the script, which the rung may have replaced."""
        self._steps = 0
        """The run's steps at its latest batch."""
        self._is_within = False
        """Whether its run is part of another Trainer's fit, which it slows down without taking a step."""

    @property
    def _recording(self) -> Recording:
        found = active_recording()
        assert found is not None, "a Trainer has a RungRecorder under a rung only"
        return found

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        # The tests of a Trainer that has fitted within a fit are no more of the script's own.
        self._is_within = self._recording.is_fitting and (stage == "fit" or self._is_within)
        if self._is_within:
            self._recording.note_pause()
        elif stage == "fit":
            self._recording.begin("Trainer", trainer.strategy)

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._steps = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        self._recording.note_pause()

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        recording, made = self._recording, trainer.global_step - self._steps
        if self._is_within:
            return
        if not trainer.is_dummy_batch:
            recording.note_batch(next(iter(sample_counts(batch)), None))
        if made:
            recording.note_steps(made)
        self._steps += made

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._recording.note_pause()

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if not trainer.sanity_checking and not self._is_within:
            self._recording.note_metrics("validation", trainer.callback_metrics)

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        if not self._is_within:
            self._recording.note_metrics("test", trainer.callback_metrics)

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        if self._is_within:
            return
        cut_steps = 0.0
        if trainer.global_step == trainer.max_steps != self._max_steps:
            batches, epochs = trainer.num_training_batches, trainer.max_epochs
            is_known = epochs != -1 and batches < math.inf
            whole = epochs * math.ceil(batches / trainer.accumulate_grad_batches) if is_known else math.inf
            cut_steps = min(whole, math.inf if self._max_steps in (None, -1) else self._max_steps) - trainer.global_step
        self._recording.end(cut_steps=max(0.0, cut_steps))

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        # What a callback of a fit calls does not end that fit.
        is_own = stage == "fit" and not self._is_within
        if is_own or not self._recording.is_running:
            self._recording.write()


def trainer_arguments(active: ActiveRung, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Trainer that differ under a rung; its strategy, devices and precision are set in the Engine."""
    if is_aside():
        return {}
    rung, changed = active.rung, dict[str, Any]()
    most = given.get("max_steps", -1)
    if rung.steps is not None and not given.get("fast_dev_run"):
        is_less = isinstance(most, int) and -1 < most < rung.steps
        changed["max_steps"] = active.replace("max_steps", most, most if is_less else rung.steps)
        least = given.get("min_steps")
        if isinstance(least, int) and least > changed["max_steps"]:
            changed["min_steps"] = active.replace("min_steps", least, None)
    if rung.compile is not None:
        options = given.get("compile", False)
        changed["compile"] = active.replace("compile", options, (options or True) if rung.compile else False)
    own: Any = given.get("callbacks")
    several = isinstance(own, Iterable) and not isinstance(own, str)
    changed["callbacks"] = [*(own if several else [] if own is None else [own]), RungRecorder(most)]
    return changed
