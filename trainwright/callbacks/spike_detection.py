"""SpikeDetection: ends a run whose loss jumps, and notes the batch."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback, check_integers
from trainwright.checkpoint.filesystem import resolve
from trainwright.errors import TrainwrightError
from trainwright.faults.tensor_checks import read_losses
from trainwright.loggers.files import write_file
from trainwright.paths import absolute

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer


INTERVAL = 50
"""Batches between two decisions of a run that writes no rows."""


class TrainingSpikeException(TrainwrightError):
    """The loss of a batch is far worse than those before it.

    Args:
        batch_idx: the index of the batch in its epoch.
    """

    def __init__(self, batch_idx: int, message: str = "") -> None:
        super().__init__(message or f"The loss of batch {batch_idx} is a spike.")
        self.batch_idx = batch_idx


class SpikeDetection(Callback):
    """Ends the run, on every rank, when a batch's loss is far worse than the mean of the latest ones.

    It reads the losses, and exchanges them between processes, every `log_every_n_steps` batches and at an epoch's end.

    Args:
        mode: "min" if a lower loss is better, "max" if a higher one is.
        window: batches of the mean.
        warmup: batches before the first decision.
        atol: how far the loss may differ from the mean, or None for no such limit.
        rtol: how many times the mean the loss may differ from it, or None for no such limit. A spike exceeds all limits.
        exclude_batches_path: a JSON file to which the index of the batch is added, for a run that skips it, or None for
            `skip_batches.json` in the logger's run folder or default_root_dir.
        finite_only: a NaN or an infinity is a spike too.

    Raises:
        ValueError: a setting is out of its range, or no limit is left.
        TrainingSpikeException: from `trainer.fit`, on every rank, with the batch's index in its epoch as `batch_idx`.

    >>> detection = tw.SpikeDetection(window=20, rtol=5.0)
    >>> try:
    ...     tw.Trainer(callbacks=detection, max_epochs=1, enable_model_summary=False).fit(module, loader)
    ... except tw.callbacks.TrainingSpikeException as spike:
    ...     print(f"look at batch {spike.batch_idx}")
    """

    @refuses_unknown
    def __init__(
        self,
        mode: str = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | os.PathLike[str] | None = None,
        finite_only: bool = True,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} is unknown; choose from min, max.")
        check_integers(1, window=window, warmup=warmup)
        if atol is None and rtol is None:
            raise ValueError("atol=None and rtol=None leave no limit; give one of them.")
        self.mode, self.window, self.warmup, self.atol, self.rtol = mode, window, warmup, atol, rtol
        self.exclude_batches_path = None if exclude_batches_path is None else absolute(exclude_batches_path)
        self.finite_only = finite_only
        self._losses: deque[float] = deque(maxlen=window)
        self._seen = 0
        self._waiting: list[tuple[int, Tensor | None]] = []
        """The batches since the latest decision, with the losses of this rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=self.window)
        self._seen = int(state["seen"])

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        if stage == "fit":
            self._losses, self._seen, self._waiting = deque(maxlen=self.window), 0, []

    def on_train_batch_end(self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._waiting.append((batch_idx, None if loss is None or trainer.is_dummy_batch else torch.as_tensor(loss)))
        if len(self._waiting) >= (trainer.log_every_n_steps or INTERVAL):
            self._decide(trainer)

    def on_train_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._decide(trainer)

    def sharded_state_dict(self, trainer: AnyTrainer, module: Module) -> dict[str, Any]:
        """Look for a spike before a checkpoint is written, so that no run resumes after it."""
        self._decide(trainer)
        return {}

    def _decide(self, trainer: TrainerProtocol) -> None:
        """Look for a spike in the batches since the latest decision, with one read of the device. Collective."""
        waiting, self._waiting = self._waiting, []
        numbers = iter(read_losses([loss for _, loss in waiting if loss is not None]))
        local = [None if loss is None else next(numbers) for _, loss in waiting]
        everywhere = trainer.engine.ranks.exchange(local, "SpikeDetection")
        for (batch_idx, _), losses in zip(waiting, zip(*everywhere, strict=True), strict=True):
            if values := [loss for loss in losses if loss is not None]:
                self._check_values(trainer, batch_idx, values)

    def _check_values(self, trainer: TrainerProtocol, batch_idx: int, values: list[float]) -> None:
        """Raise TrainingSpikeException if the mean of the ranks' losses is a spike."""
        # fsum raises for inf and -inf together.
        mean = math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan
        self._seen += 1
        if self._seen > self.warmup and self._is_spike(mean):
            failure = self._note(trainer, batch_idx)
            count, before = len(self._losses), math.fsum(self._losses) / max(len(self._losses), 1)
            others = f"where the last {count} batches had {before:.6g}" if count else "and no batch had a finite one"
            raise TrainingSpikeException(
                batch_idx,
                f"The loss of batch {batch_idx} in epoch {trainer.current_epoch} is {mean:.6g}, {others}.{failure}",
            )
        # One infinity would make the mean infinite for a whole window.
        if math.isfinite(mean):
            self._losses.append(mean)

    def _is_spike(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return self.finite_only
        if not self._losses:
            return False
        mean = math.fsum(self._losses) / len(self._losses)
        distance = loss - mean if self.mode == "min" else mean - loss
        limits = [self.atol, None if self.rtol is None else self.rtol * abs(mean)]
        return all(distance > limit for limit in limits if limit is not None)

    def _note(self, trainer: TrainerProtocol, batch_idx: int) -> str:
        """Add the batch to the file. Return a sentence for the error if that failed, since the spike matters more."""
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return ""
        path = self.exclude_batches_path or f"{trainer.log_dir or trainer.default_root_dir}/skip_batches.json"
        try:
            files, inside = resolve(path)
            noted: list[int] = []
            if files.exists(inside):
                with files.open(inside) as stream:
                    noted = json.loads(stream.read())
            write_file(path, json.dumps(sorted({*noted, batch_idx})).encode())
        except (OSError, ValueError, TypeError) as error:
            return f" It was not noted in {path} ({error}); pass another exclude_batches_path."
        return ""
