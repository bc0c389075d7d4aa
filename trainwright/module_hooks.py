"""The hooks of a Module, in the order of trainer/hooks.py, and the types of its methods' arguments and results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.data.transfer import to_device

AnyTrainer: TypeAlias = Any
"""The Trainer of a hook or a module. Users may annotate it with `tw.Trainer` or with `tw.callbacks.TrainerProtocol`."""
STEP_OUTPUT: TypeAlias = Tensor | Mapping[str, Any] | None
"""The result of a step: a loss, a dict with one under "loss", or None to skip the batch."""
TRAIN_DATALOADERS: TypeAlias = Any
EVAL_DATALOADERS: TypeAlias = Any
"""A loader, or a nested structure of them."""
LRSchedulerTypeUnion: TypeAlias = LRScheduler
LRSchedulerPLType: TypeAlias = LRScheduler
OptimizerLRSchedulerConfig: TypeAlias = Mapping[str, Any]
OptimizerLRScheduler: TypeAlias = Any
"""The result of configure_optimizers."""


class ModuleHooks:
    """Methods that a run calls at certain points. They do nothing, or the usual work, unless overridden."""

    def configure_callbacks(self) -> Any:
        """Return a callback, or a list of them, for the Trainer. It replaces a callback of its class that the Trainer has."""
        return []

    def prepare_data(self) -> None:
        """Called first, on one process per node: download and unpack here, and store nothing on self."""

    def setup(self, stage: str) -> None:
        """Called after the callbacks' setup, on every rank. Stage is "fit", "validate", "test" or "predict"."""

    def configure_model(self) -> None:
        """Called after setup in every run, before the module moves to its device. Make large layers here if there are none."""

    def train_dataloader(self) -> Any:
        """Return the training loader, or several. It is used if none is passed to fit."""
        raise RuntimeError(f"{type(self).__name__} has no train_dataloader. Define it, or pass the loaders to fit.")

    def val_dataloader(self) -> Any:
        """Return the validation loader, or several in a list or a dict of names."""
        raise RuntimeError(f"{type(self).__name__} has no val_dataloader. Define it, or pass the loaders.")

    def test_dataloader(self) -> Any:
        """Return the test loader, or several in a list or a dict of names."""
        raise RuntimeError(f"{type(self).__name__} has no test_dataloader. Define it, or pass the loaders.")

    def predict_dataloader(self) -> Any:
        """Return the loader of the samples to predict, or several in a list or a dict of names."""
        raise RuntimeError(f"{type(self).__name__} has no predict_dataloader. Define it, or pass the loaders.")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to move to the device, such as a changed one."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on the device."""
        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to compute with, such as one augmented on the device."""
        return batch

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written, with its contents. Keys may be added or removed.

        `checkpoint["state_dict"]` maps names to this rank's tensors. Added values must be plain data and tensors.
        """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called with the contents of a checkpoint before they are loaded. Its "state_dict" may be changed."""

    def teardown(self, stage: str) -> None:
        """Called last, on every rank, also after a failure."""

    def on_fit_start(self) -> None:
        """Called once the model and the optimizers are prepared, before their state is loaded from a checkpoint."""

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
        """Called with the batch on its device, before training_step. Return -1 on every rank to end the epoch here."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after the steps of optimizer and schedulers, with training_step's detached outputs, its loss as "loss"."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before the gradients of a new accumulation window are cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before backward, with the loss divided by the window's length."""

    def on_after_backward(self) -> None:
        """Called after backward. Gradients may still be multiplied by the loss scale."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before the gradients are clipped and the optimizer steps. The loss scale is divided out by then."""

    def on_validation_start(self) -> None:
        """Called before validation, with the module in evaluation mode."""

    def on_validation_end(self) -> None:
        """Called after validation, with its metrics in trainer.callback_metrics."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch. Values logged here count for this validation."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before validation_step."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after validation_step."""

    def on_test_start(self) -> None:
        """Called before a test, with the module in evaluation mode."""

    def on_test_end(self) -> None:
        """Called after a test, with its metrics in trainer.callback_metrics."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch. Values logged here count for this test."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before test_step."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after test_step."""

    def on_predict_start(self) -> None:
        """Called before predicting, with the module in evaluation mode."""

    def on_predict_end(self) -> None:
        """Called after predicting."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first batch to predict."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last batch to predict."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before predict_step."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after predict_step, with its result."""

    def on_validation_model_zero_grad(self) -> None:
        """Called before a validation in fit, unless an accumulation window is open, by default it clears the gradients."""
        self.zero_grad()  # type: ignore[attr-defined]

    def on_validation_model_eval(self) -> None:
        """Called to switch the module to evaluation mode for a validation, a test or predicting."""
        self.eval()  # type: ignore[attr-defined]

    def on_validation_model_train(self) -> None:
        """Called after a validation, a test or predicting. If not overridden, it restores the submodules' earlier modes."""
        self.train()  # type: ignore[attr-defined]

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval
    on_test_model_train = on_predict_model_train = on_validation_model_train
