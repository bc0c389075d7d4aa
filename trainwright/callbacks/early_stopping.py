"""EarlyStopping: stop training once a metric no longer improves."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback, check_integers
from trainwright.callbacks.checkpoint_policy import chosen_mode
from trainwright.errors import a_type_of
from trainwright.rank_zero import say, warn

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer


class EarlyStoppingReason(Enum):
    """Why EarlyStopping stopped a run."""

    NOT_STOPPED = "not_stopped"
    STOPPING_THRESHOLD = "stopping_threshold"
    DIVERGENCE_THRESHOLD = "divergence_threshold"
    PATIENCE_EXHAUSTED = "patience_exhausted"
    NON_FINITE_METRIC = "non_finite_metric"


class EarlyStopping(Callback):
    """Stops training when a metric has not improved for `patience` checks.

    Args:
        monitor: the metric to watch.
        min_delta: a change counts as an improvement only if it is larger than this.
        patience: checks in a row without improvement after which the run stops.
        verbose: print every improvement and the reason for stopping. False prints the reason on rank 0.
        mode: "min" or "max": which value of the metric is better, by default "min", with a warning for names such as "acc".
        strict: raise if the metric was not logged. False skips the check, with one warning.
        check_finite: stop when the metric is NaN or infinite.
        stopping_threshold: stop as soon as the metric is better than this.
        divergence_threshold: stop as soon as the metric is worse than this.
        check_on_train_epoch_end: True checks at the end of every training epoch, and False after every validation. By default
            it checks after validations if fit has any, and otherwise at the end of training epochs.
        log_rank_zero_only: with verbose, print on rank 0 only rather than on every rank.

    The check for a validation at an epoch's end waits for the epoch's training metrics, so either kind can be monitored. Rank
    0's value decides for all ranks. Nothing is checked in the sanity check or with fast_dev_run. A fit from scratch starts
    counting from zero.

    Raises:
        TypeError, ValueError: a setting is not accepted.
        ValueError: from fit, with strict, if the metric was not logged.

    >>> stopping = tw.EarlyStopping("val_loss", min_delta=0.05, patience=2)
    >>> trainer = tw.Trainer(callbacks=stopping, max_epochs=50, enable_model_summary=False)
    >>> trainer.fit(module, loader, val_loader)
    >>> trainer.current_epoch < 50
    True
    """

    priority = -10  # the reduced metrics of an epoch are there

    @refuses_unknown
    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str | None = None,
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        if not isinstance(monitor, str):
            raise TypeError(f"monitor={monitor!r} is {a_type_of(monitor)}; pass the name of a metric that you log.")
        check_integers(0, patience=patience)
        if not isinstance(min_delta, (int, float)) or not math.isfinite(min_delta) or min_delta < 0:
            raise ValueError(f"min_delta={min_delta!r} is not accepted; pass a number of at least 0 (for either mode).")
        self.monitor, self.min_delta, self.patience = monitor, float(min_delta), patience
        self.mode = chosen_mode(mode, monitor, type(self).__name__)
        self.verbose, self.strict, self.check_finite = verbose, strict, check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.check_on_train_epoch_end, self.log_rank_zero_only = check_on_train_epoch_end, log_rank_zero_only
        self._is_fitting = self._has_warned = self._is_due = False
        self._reset()

    def _reset(self) -> None:
        self.wait_count = 0
        self.stopped_epoch = 0
        # float64, because a float32 would round the score that later ones are compared with.
        self.best_score: Tensor = torch.tensor(math.inf if self.mode == "min" else -math.inf, dtype=torch.float64)
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._saved_limits = self._limits

    @property
    def _limits(self) -> list[Any]:
        return [self.patience, self.check_finite, self.stopping_threshold, self.divergence_threshold]

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}(monitor={self.monitor}, mode={self.mode})"

    def state_dict(self) -> dict[str, Any]:
        names = ("wait_count", "stopped_epoch", "patience", "stopping_reason_message")
        values = {"best_score": float(self.best_score), "stopping_reason": self.stopping_reason.value}
        return {**{name: getattr(self, name) for name in names}, **values, "limits": self._limits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait_count, self.stopped_epoch = int(state["wait_count"]), int(state["stopped_epoch"])
        self.best_score = torch.tensor(float(state["best_score"]), dtype=torch.float64)
        self.stopping_reason = EarlyStoppingReason(state["stopping_reason"])
        self.stopping_reason_message = state["stopping_reason_message"]
        self._saved_limits = state.get("limits", [state["patience"], *self._limits[1:]])

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        self._is_fitting, self._is_due = stage == "fit", False
        if stage == "fit":
            self._reset()

    def on_resume_start(self, trainer: AnyTrainer, module: Module) -> None:
        """Stop a run again that had been stopped, unless its limits have changed."""
        if self._saved_limits != self._limits:
            self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None
        elif self.has_requested_stop(trainer, module):
            trainer.should_stop = True
            if trainer.is_global_zero:
                say(str(self.stopping_reason_message))

    def has_requested_stop(self, trainer: AnyTrainer, module: Module) -> bool:
        return self.stopping_reason is not EarlyStoppingReason.NOT_STOPPED

    def on_validation_end(self, trainer: AnyTrainer, module: Module) -> None:
        if not self._is_fitting or trainer.sanity_checking or self.check_on_train_epoch_end:
            return
        if self.check_on_train_epoch_end is None and not trainer.state.progress.is_mid_epoch_validation:
            self._is_due = True  # the epoch's training metrics are still to come
        else:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        is_due, self._is_due = self._is_due, False
        if self.check_on_train_epoch_end is None:
            is_due = is_due or not trainer.enable_validation
        # A run that stops within the epoch does not check, since the resumed run reaches the epoch's end.
        if trainer.state.epoch_ended and (is_due or self.check_on_train_epoch_end):
            self._check(trainer)

    def _check(self, trainer: TrainerProtocol) -> None:
        """Check by rank 0's value. Collective."""
        if trainer.fast_dev_run:
            return
        score = trainer.engine.ranks.decide(lambda: self._score(trainer), "the score of EarlyStopping")
        if score is None:
            return
        reason, message = self._count(score)
        is_first = False
        if reason is not EarlyStoppingReason.NOT_STOPPED:
            is_first, trainer.should_stop = not trainer.should_stop, True  # min_epochs may delay the stop
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason, self.stopping_reason_message = reason, message
        if self.verbose and message and (trainer.is_global_zero or not self.log_rank_zero_only):
            say(f"rank {trainer.global_rank}: {message}" if trainer.world_size > 1 else message)
        elif is_first and trainer.is_global_zero:
            say(message)

    def _score(self, trainer: TrainerProtocol) -> float | None:
        """Return the metric's value, or None if it is missing and optional. On rank 0, since a step's value differs by rank."""
        if self.strict or self.monitor in trainer.callback_metrics:
            return float(trainer.metrics.monitored(self.monitor, "EarlyStopping"))
        if not self._has_warned:
            self._has_warned = True
            warn(f"EarlyStopping monitors {self.monitor!r}, which was not logged; the check is skipped.", stacklevel=2)
        return None

    def _count(self, score: float) -> tuple[EarlyStoppingReason, str]:
        """Count a score. Return whether and why it stops the run, and the message."""
        best = float(self.best_score)
        if self.check_finite and not math.isfinite(score):
            message = f"{self.monitor} = {score} is not finite (best {best:.6g}); stopping."
            return EarlyStoppingReason.NON_FINITE_METRIC, message
        if self.stopping_threshold is not None and self._is_better(score, self.stopping_threshold):
            message = f"{self.monitor} = {score:.6g} has reached the threshold {self.stopping_threshold}; stopping."
            return EarlyStoppingReason.STOPPING_THRESHOLD, message
        if self.divergence_threshold is not None and self._is_better(self.divergence_threshold, score):
            message = f"{self.monitor} = {score:.6g} is worse than the limit {self.divergence_threshold}; stopping."
            return EarlyStoppingReason.DIVERGENCE_THRESHOLD, message
        if self._is_better(score, best, self.min_delta):
            self.best_score, self.wait_count = torch.tensor(score, dtype=torch.float64), 0
            gain = f" by {abs(best - score):.6g}" if math.isfinite(best) else ""
            return EarlyStoppingReason.NOT_STOPPED, f"{self.monitor} improved{gain}: {score:.6g}"
        self.wait_count += 1
        if self.wait_count < self.patience:
            return EarlyStoppingReason.NOT_STOPPED, ""
        message = f"{self.monitor} has not improved for {self.wait_count} checks (best {best:.6g}); stopping."
        return EarlyStoppingReason.PATIENCE_EXHAUSTED, message

    def _is_better(self, score: float, other: float, margin: float = 0.0) -> bool:
        return score < other - margin if self.mode == "min" else score > other + margin
