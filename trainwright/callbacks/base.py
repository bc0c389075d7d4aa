"""The callback contract: hooks to override, and state to keep. The order of the hooks stands in trainer/hooks.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.trainer.trainer import Trainer


class Callback:
    """Override the hooks that are wanted; a hook is called on every rank."""

    runs_last = False
    """True: called after the others, and at an epoch's end after the module too (it judges what they logged)."""

    @property
    def state_key(self) -> str:
        """Return the name under which a checkpoint keeps this callback's state; unlike for unlike settings."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain data and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Called first of all; stage is "fit", "validate" or "test"."""

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Called last of all, in reversed order, after a failure too."""

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """Called when the run ends by an exception, on the rank that raised it."""

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Called once the model and the optimizers are prepared, before a checkpoint is restored."""

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        """Called after on_train_end."""

    def on_sanity_check_start(self, trainer: Trainer, module: Module) -> None:
        """Called before the few validation batches that prove validation works."""

    def on_sanity_check_end(self, trainer: Trainer, module: Module) -> None:
        """Called after them."""

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Called after the sanity check, before the first epoch."""

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Called before the first batch of an epoch."""

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Called after the last batch of an epoch and the validation that follows it."""

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> int | None:
        """Called with the batch on its device, before training_step; return -1, on every rank, to end the epoch here."""

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called with what training_step returned, after the optimizer's and the scheduler's step."""

    def on_before_zero_grad(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        """Called before the gradients of a new accumulation window are cleared."""

    def on_before_backward(self, trainer: Trainer, module: Module, loss: Tensor) -> None:
        """Called before backward, with the loss as it goes backward."""

    def on_after_backward(self, trainer: Trainer, module: Module) -> None:
        """Called after backward; gradients may still be multiplied by the loss scale."""

    def on_before_optimizer_step(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        """Called before the gradients are clipped and the optimizer steps."""

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        """Called before validation, with the module in evaluation mode."""

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """Called after validation, with its metrics in trainer.callback_metrics."""

    def on_validation_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        """Called before validation_step."""

    def on_validation_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after validation_step."""

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        """Called before a test, with the module in evaluation mode."""

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        """Called after a test, with its metrics in trainer.callback_metrics."""

    def on_test_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        """Called before test_step."""

    def on_test_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after test_step."""
