"""ProgressBar: the base of all progress bars, with the totals and the metrics that they show."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainwright.callbacks.base import Callback
from trainwright.module_hooks import AnyTrainer
from trainwright.rank_zero import above_bars

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import Batches, TrainerProtocol
    from trainwright.module import Module


class ProgressBar(Callback):
    """The base of progress bars. It shows nothing: override the hooks at which yours does, and ask it for totals and metrics.

    A Trainer that has one in its callbacks adds no other. Before a run it is disabled on all ranks but 0.

    >>> class Percent(tw.ProgressBar):
    ...     def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
    ...         if self.is_enabled:
    ...             print(f"{(batch_idx + 1) / self.total_train_batches:.0%}", end="\\r")
    """

    priority = -10  # the reduced metrics of an epoch are shown at its end

    sanity_check_description = "Sanity check"
    train_description = "Epoch"
    """The number of the epoch follows it."""
    validation_description = "Validation"
    test_description = "Test"
    predict_description = "Predict"

    # Of the class, so that a subclass need not call this constructor.
    _is_wanted = True
    _evaluated_loader: int | None = None
    """The loader that `has_dataloader_changed` was last given."""

    @property
    def is_enabled(self) -> bool:
        """Return whether anything is shown."""
        return self._is_wanted

    @property
    def is_disabled(self) -> bool:
        """Return whether nothing is shown."""
        return not self.is_enabled

    def disable(self) -> None:
        """Show nothing from now on."""
        self._is_wanted = False

    def enable(self) -> None:
        """Show progress again, from the next run on."""
        self._is_wanted = True

    @property
    def trainer(self) -> TrainerProtocol:
        """Return the Trainer of the run, in its hooks."""
        trainer: TrainerProtocol = self._module().trainer
        return trainer

    @property
    def total_train_batches(self) -> Batches:
        """Return the training batches of an epoch, or of the run up to max_steps without a limit of epochs."""
        trainer, batches = self.trainer, self.trainer.num_training_batches
        if trainer.max_steps == -1 or trainer.max_epochs != -1:
            return batches
        steps = trainer.max_steps - trainer.global_step
        return min(batches, trainer.state.batch + steps * trainer.accumulate_grad_batches)

    @property
    def total_val_batches(self) -> Batches:
        """Return the batches of a validation, of all its loaders. It is 0 in a fit that does not validate."""
        return sum(self.trainer.num_val_batches) if self.trainer.enable_validation else 0

    @property
    def total_val_batches_current_dataloader(self) -> Batches:
        """Return the batches of the running validation loader, or of its part in the sanity check."""
        trainer = self.trainer
        return self._of_loader(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> Batches:
        """Return the batches of the test loader that runs."""
        return self._of_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> Batches:
        """Return the batches of the prediction loader that runs."""
        return self._of_loader(self.trainer.num_predict_batches)

    def _of_loader(self, numbers: list[Batches]) -> Batches:
        return numbers[self._evaluated_loader or 0]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return whether an evaluation has another loader than at the previous call, and note which it has."""
        has_changed = dataloader_idx != self._evaluated_loader
        self._evaluated_loader = dataloader_idx
        return has_changed

    def reset_dataloader_idx_tracker(self) -> None:
        """Let the next loader of `has_dataloader_changed` be a new one, at the start of an evaluation."""
        self._evaluated_loader = None

    def get_metrics(self, trainer: AnyTrainer, module: Module) -> dict[str, Any]:
        """Return the texts next to a bar: the run's version and the metrics. Override it to change them."""
        version = getattr(trainer.loggers[0], "version", None) if trainer.loggers else None
        items: dict[str, Any] = {} if version in (None, "") else {"v_num": version}
        return {**items, **trainer.progress_bar_metrics}

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print, above the bars if there are any."""
        with above_bars():
            builtins.print(*args, sep=sep, **kwargs)

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        if not trainer.is_global_zero:
            self.disable()


def rounded(metrics: dict[str, Any], digits: int = 4) -> dict[str, str]:
    """Return the numbers as short text with this many significant digits. Large ones keep all digits before the point."""

    def short(value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.{digits}g}"

    return {name: short(value) for name, value in plain(metrics).items()}


def plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics with tensors as numbers."""
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
