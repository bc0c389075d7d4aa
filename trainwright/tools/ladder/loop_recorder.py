"""LoopRecorder: how a rung records a loop that is written with an Accelerator, and ends it."""

from __future__ import annotations

import torch

from trainwright.overrides import LoopObserver
from trainwright.tools.ladder.recording import Recording


class LoopRecorder(LoopObserver):
    """Notes the steps of a loop, and which of its batches were trained: those that a backward has followed."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._samples: int | None = None
        """The samples in the latest batch."""
        self._is_waiting = self._has_trained = self._has_batches = self._has_begun = False
        """Whether the latest batch was not trained yet; whether one was since the latest step, or ever; the clock runs."""
        self._is_within = False
        """Whether the loop is part of a Trainer's fit, of which it takes time but makes no step."""
        recording.note_made("Accelerator")

    def begin(self, device: torch.device, strategy: str, precision: str, num_processes: int) -> None:
        """Begin the clock, when the loop's first objects are prepared."""
        if not self._has_begun:
            self._has_begun, self._is_within = True, self._recording.is_fitting
            if self._is_within:
                self._recording.note_pause()
            else:
                self._recording.begin("Accelerator", device, strategy, precision, num_processes)

    def note_pass(self) -> None:
        """Note that a pass over a loader begins: an evaluation, or the next epoch."""
        self._recording.note_pause()

    def note_batch(self, num_samples: int | None) -> None:
        self._samples, self._is_waiting = num_samples, True

    def note_training(self) -> None:
        """Note a backward, the first of which trains the latest batch."""
        if self._is_waiting and not self._is_within:
            self._is_waiting, self._has_trained, self._has_batches = False, True, True
            self._recording.note_batch(self._samples)

    def note_step(self, count: int) -> None:
        """Note the step of an optimizer; SystemExit once there are as many as the rung makes, also if the loop catches it."""
        if self._is_within:
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
