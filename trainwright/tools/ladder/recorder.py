"""LadderObserver: records a script under a rung. RungRecorder records a Trainer, LoopRecorder a loop with an Accelerator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainwright import Callback
from trainwright.data.batch_stream import sample_counts
from trainwright.overrides import OverrideFile, active_file
from trainwright.tools.ladder.recording import Recording

if TYPE_CHECKING:
    from trainwright import Module, Trainer


class RungRecorder(Callback):
    """Records the steps, samples and metrics of a Trainer. It has no state, so a copy in another process records there."""

    reads_outputs = False

    def __init__(self, max_steps: int = -1) -> None:
        self._max_steps = max_steps
        """The limit of the script, which the rung may have replaced."""
        self._steps = 0
        """The run's steps at its latest batch."""

    @property
    def _recording(self) -> Recording:
        observer = running_file().observer
        assert isinstance(observer, LadderObserver)
        return observer.recording

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        if stage == "fit":
            if self._recording.is_fitting:
                raise RuntimeError(
                    "a Trainer fits within the fit of another, whose speed the ladder cannot measure. Run the script without "
                    "the ladder, or leave the callback out that trains."
                )
            strategy, size = trainer.strategy, trainer.world_size
            self._recording.begin("Trainer", strategy.device, strategy.name, strategy.precision.name, size)

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._steps = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        self._recording.note_pause()

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        recording, made = self._recording, trainer.global_step - self._steps
        if not trainer.is_dummy_batch:
            recording.note_batch(next(iter(sample_counts(batch)), None))
        if made:
            recording.note_steps(made)
        self._steps += made

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._recording.note_pause()

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if not trainer.sanity_checking:
            self._recording.note_metrics("validation", trainer.callback_metrics)

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        self._recording.note_metrics("test", trainer.callback_metrics)

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        cut_steps = 0.0
        if trainer.global_step == trainer.max_steps != self._max_steps:
            batches, epochs = trainer.num_training_batches, trainer.max_epochs
            is_known = epochs != -1 and batches < math.inf
            whole = epochs * math.ceil(batches / trainer.accumulate_grad_batches) if is_known else math.inf
            cut_steps = min(whole, math.inf if self._max_steps in (None, -1) else self._max_steps) - trainer.global_step
        self._recording.end(cut_steps=max(0.0, cut_steps))

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        if stage == "fit" or not self._recording.is_running:  # an evaluation within a fit does not end it
            self._recording.write()


class LoopRecorder:
    """Records the steps of a loop and its trained batches: a batch counts if a backward follows it."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._samples: int | None = None
        """The samples in the latest batch."""
        self._is_waiting = False
        """Whether the latest batch has had no backward yet."""
        self._has_trained = self._has_batches = False
        """Whether a batch was trained since the latest step, or ever."""
        self._has_begun = False
        recording.note_made("Accelerator")

    def begin(self, device: torch.device, strategy: str, precision: str, num_processes: int) -> None:
        """Start the clock when the loop's first objects are prepared."""
        if not self._has_begun and not self._recording.is_fitting:
            self._has_begun = True
            self._recording.begin("Accelerator", device, strategy, precision, num_processes)

    def note_pass(self) -> None:
        """Record the start of a pass over a loader: an evaluation, or the next epoch."""
        self._recording.note_pause()

    def note_batch(self, num_samples: int | None) -> None:
        self._samples, self._is_waiting = num_samples, True

    def note_training(self) -> None:
        """Record a backward. The first one after a batch trains that batch."""
        if self._is_waiting and not self._recording.is_fitting:
            self._is_waiting, self._has_trained, self._has_batches = False, True, True
            self._recording.note_batch(self._samples)

    def note_step(self, count: int) -> None:
        """Record an optimizer step. SystemExit at the rung's last step, and again if the loop catches it."""
        if self._recording.is_fitting:  # a loop within a fit slows it down, and adds no step to it
            return
        if self._recording.is_cut:
            raise SystemExit(0)
        if self._has_trained or not self._has_batches:
            if not self._has_trained:  # the loop reads no prepared loader
                self._recording.note_batch(None)
            self._has_trained = False
            self._recording.note_steps(1)
        else:
            self._recording.count_step()
        limit = self._recording.rung.steps
        if limit is not None and count >= limit:
            self._recording.cut()


def running_file() -> OverrideFile:
    """Return the file of the rung under which this process runs."""
    file = active_file()
    assert file is not None, "a recorder exists under a rung only"
    return file


class LadderObserver:
    """Records the Trainers and loops of a process under a rung."""

    def __init__(self) -> None:
        self.recording = Recording(running_file())

    def note_made(self, owner: str) -> None:
        self.recording.note_made(owner)

    def added_arguments(self, owner: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the callbacks of a Trainer with a RungRecorder."""
        callbacks: Any = arguments.get("callbacks")
        several = isinstance(callbacks, Iterable) and not isinstance(callbacks, str)
        listed = [*callbacks] if several else [] if callbacks is None else [callbacks]
        return {"callbacks": [*listed, RungRecorder(arguments.get("max_steps", -1))]}

    def loop(self) -> LoopRecorder:
        return LoopRecorder(self.recording)

    def note_logged(self, values: Mapping[str, Any]) -> None:
        self.recording.note_logged(values)
