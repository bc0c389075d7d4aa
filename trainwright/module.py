"""Module: what the user subclasses. It says what one step computes; the Trainer says when and where."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torchmetrics import Metric

    from trainwright.trainer.trainer import Trainer


class Module(nn.Module):
    """A torch module with the steps and the optimizers of its training.

    Override `training_step` and `configure_optimizers`; the rest where it is wanted. A step gets the batch on the right
    device and its index within the epoch.
    """

    automatic_optimization = True
    """False: training_step itself calls `manual_backward` and steps the optimizers that `optimizers()` returns."""

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Trainer | None = None

    # -- what one step computes --------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | dict[str, Any] | None:
        """Return the loss of one batch: a tensor of one element, or a dict that holds it under "loss"."""
        raise RuntimeError(f"{type(self).__name__} has no training_step; define it to call trainer.fit.")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch during fit and `trainer.validate`; log what should be known of it."""
        raise RuntimeError(f"{type(self).__name__} has no validation_step; define it to call trainer.validate.")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch in `trainer.test`."""
        raise RuntimeError(f"{type(self).__name__} has no test_step; define it to call trainer.test.")

    def configure_optimizers(self) -> Any:
        """Return the optimizer, or (optimizers, schedulers), or a dict with "optimizer" and "lr_scheduler"."""
        raise RuntimeError(f"{type(self).__name__} has no configure_optimizers; define it to call trainer.fit.")

    # -- what a step may ask for -------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str = "mean",
        *,
        sync_dist: bool = False,
        batch_size: int | None = None,
    ) -> None:
        """Log a number under a name.

        Args:
            name: the metric's name; with on_step and on_epoch both, it is logged as name_step and name_epoch.
            value: a number, a tensor of one element (it stays on its device until it is read), or a torchmetrics Metric
                that is an attribute of this module (computed and reset when the epoch ends).
            prog_bar, logger: whether the progress bar and the loggers show it.
            on_step: log the value of this very step; the default in training_step.
            on_epoch: log the reduction over the epoch and over all ranks; the default elsewhere.
            reduce_fx: "mean" (weighted by batch_size), "sum", "min" or "max".
            sync_dist: accepted and not needed: epoch values are exact over all ranks, step values are this rank's own.
            batch_size: samples behind this value; found in the batch where it is not given.

        Raises:
            RuntimeError: outside of a trainer's run.
            ValueError: an unknown reduce_fx, a tensor of several elements, a name logged in two different ways.
        """
        trainer = self._trainer if self._trainer is not None else self.trainer  # which says what is wrong
        collector = trainer.logbook.collector
        if collector is None:
            raise RuntimeError(
                f"self.log({name!r}, ...) was called where nothing is collected; log in a step, or in a hook from the start "
                "of an epoch to its end."
            )
        collector.log(name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, batch_size)

    def log_dict(self, values: dict[str, Any], **kwargs: Any) -> None:
        """Log each value of a flat dict under its key; the keyword arguments are those of `log`."""
        for name, value in values.items():
            self.log(name, value, **kwargs)

    def optimizers(self) -> Any:
        """Return the optimizer, or the list of them where there are several, for manual optimization."""
        prepared = self.trainer.prepared_optimizers
        return prepared[0] if len(prepared) == 1 else list(prepared)

    def lr_schedulers(self) -> Any:
        """Return the scheduler, or the list of them, for manual optimization; None where there is none."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Send a loss backward under manual optimization, with the scale and the averaging over ranks that it needs."""
        self.trainer.engine.backward(loss, retain_graph)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        self.trainer.print(*args, **kwargs)

    # -- where it is -------------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """Return the trainer that runs this module; RuntimeError where none does."""
        if self._trainer is None:
            raise RuntimeError(
                f"{type(self).__name__} is attached to no trainer; self.log, self.trainer and their like work inside "
                "trainer.fit, trainer.validate and trainer.test."
            )
        return self._trainer

    @property
    def device(self) -> torch.device:
        """Return the device of the first parameter; the CPU where there is none."""
        parameter = next(self.parameters(), None)
        return parameter.device if parameter is not None else torch.device("cpu")

    @property
    def current_epoch(self) -> int:
        """Return the number of the epoch, from 0; 0 outside of a run."""
        return self._trainer.current_epoch if self._trainer is not None else 0

    @property
    def global_step(self) -> int:
        """Return how many optimizer steps were made; 0 outside of a run."""
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def global_rank(self) -> int:
        """Return this process's rank in the job; 0 outside of a run."""
        return self._trainer.global_rank if self._trainer is not None else 0

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of the module is the module alone, not the run that it is in.
        return {**self.__dict__, "_trainer": None}

    # -- hooks, in the order of trainer/hooks.py ---------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Called first of all, on every rank; stage is "fit", "validate" or "test"."""

    def teardown(self, stage: str) -> None:
        """Called last of all, on every rank."""

    def on_fit_start(self) -> None:
        """Called once the model and the optimizers are prepared, before a checkpoint is restored."""

    def on_fit_end(self) -> None:
        """Called after on_train_end."""

    def on_train_start(self) -> None:
        """Called after the sanity check, before the first epoch."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called before the first batch of an epoch."""

    def on_train_epoch_end(self) -> None:
        """Called after the last batch of an epoch and the validation that follows it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called with the batch on its device, before training_step; return -1, on every rank, to end the epoch here."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called with what training_step returned, after the optimizer's and the scheduler's step."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before the gradients of a new accumulation window are cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before backward, with the loss as it goes backward (divided by the window's length)."""

    def on_after_backward(self) -> None:
        """Called after backward; gradients may still be multiplied by the loss scale."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before the gradients are clipped and the optimizer steps; they are divided by the loss scale by now."""

    def on_validation_start(self) -> None:
        """Called before validation, with the module in evaluation mode."""

    def on_validation_end(self) -> None:
        """Called after validation, with its metrics in trainer.callback_metrics."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch; what is logged here counts for this validation."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called before validation_step."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after validation_step."""

    def on_test_start(self) -> None:
        """Called before a test, with the module in evaluation mode."""

    def on_test_end(self) -> None:
        """Called after a test, with its metrics in trainer.callback_metrics."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch; what is logged here counts for this test."""

    def on_test_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called before test_step."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after test_step."""


def is_metric(value: object) -> TypeGuard[Metric]:
    """Return whether a value is a torchmetrics object. Where nobody has imported torchmetrics, nobody has made one."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def is_overridden(method: str, owner: object, base: type) -> bool:
    """Return whether the owner's class, or the owner itself, defines a method anew that the base class has."""
    return method in vars(owner) or getattr(type(owner), method, None) is not getattr(base, method)
