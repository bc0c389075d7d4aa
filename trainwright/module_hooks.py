"""The hooks of a Module: what it may override along a run, in the order of trainer/hooks.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.data.transfer import to_device


class ModuleHooks:
    """Methods that are called at a point of a run, and do nothing, or what is usual, unless overridden."""

    def configure_callbacks(self) -> Any:
        """Return a callback, or a list of them, for the Trainer; one of a class that it has already takes that one's place."""
        return []

    def prepare_data(self) -> None:
        """Called first of all, on one process of each node: download and unpack here, and keep nothing on self."""

    def setup(self, stage: str) -> None:
        """Called after the callbacks' setup, on every rank; stage is "fit", "validate", "test" or "predict"."""

    def configure_model(self) -> None:
        """Called after setup, before the module is placed and the optimizers are made: large layers may be made here.

        It is called at the beginning of each run, so do nothing where the layers are there already.
        """

    def train_dataloader(self) -> Any:
        """Return the training loader, or several; used where fit is given none."""
        raise RuntimeError(f"{type(self).__name__} has no train_dataloader; define it, or pass the loaders to fit.")

    def val_dataloader(self) -> Any:
        """Return the validation loader, or several in a list or a dict of names."""
        raise RuntimeError(f"{type(self).__name__} has no val_dataloader; define it, or pass the loaders.")

    def test_dataloader(self) -> Any:
        """Return the test loader, or several in a list or a dict of names."""
        raise RuntimeError(f"{type(self).__name__} has no test_dataloader; define it, or pass the loaders.")

    def predict_dataloader(self) -> Any:
        """Return the loader to predict, or several in a list or a dict of names."""
        raise RuntimeError(f"{type(self).__name__} has no predict_dataloader; define it, or pass the loaders.")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch, changed where wanted, before it goes to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on the device."""
        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch, changed where wanted, on the device."""
        return batch

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written, with its contents; keys may be added or removed.

        `checkpoint["state_dict"]` maps names to this rank's tensors; "callbacks", "lr_schedulers", "position" and
        "hyper_parameters" are plain data. What is added is stored if it is plain data and tensors.
        """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called with the contents of a checkpoint before they are taken; its "state_dict" may be changed."""

    def teardown(self, stage: str) -> None:
        """Called last of all, on every rank, after a failure too."""

    def on_fit_start(self) -> None:
        """Called once the model and the optimizers are prepared, before weights and optimizers are taken from a checkpoint."""

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
        """Called after the last test batch; what is logged here counts for this test."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before test_step."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after test_step."""

    def on_predict_start(self) -> None:
        """Called before a prediction, with the module in evaluation mode."""

    def on_predict_end(self) -> None:
        """Called after a prediction."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first batch to predict."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last batch to predict."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before predict_step."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after predict_step, with what it returned."""

    def on_validation_model_zero_grad(self) -> None:
        """Called before a validation of fit, where no accumulation window is open; by default the gradients are dropped."""
        self.zero_grad()  # type: ignore[attr-defined]

    def on_validation_model_eval(self) -> None:
        """Called to put the module into evaluation mode for a validation."""
        self.eval()  # type: ignore[attr-defined]

    def on_validation_model_train(self) -> None:
        """Called to put the module back into training mode; by default each submodule goes back to the mode it was in."""
        self.train()  # type: ignore[attr-defined]

    def on_test_model_eval(self) -> None:
        """Called to put the module into evaluation mode for a test."""
        self.eval()  # type: ignore[attr-defined]

    def on_test_model_train(self) -> None:
        """Called after a test; by default each submodule goes back to the mode it was in."""
        self.train()  # type: ignore[attr-defined]

    def on_predict_model_eval(self) -> None:
        """Called to put the module into evaluation mode for a prediction."""
        self.eval()  # type: ignore[attr-defined]

    def on_predict_model_train(self) -> None:
        """Called after a prediction; by default each submodule goes back to the mode it was in."""
        self.train()  # type: ignore[attr-defined]
