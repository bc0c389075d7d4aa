"""GradientAccumulationScheduler: how many batches make an optimizer step, by epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer


class GradientAccumulationScheduler(Callback):
    """Sets trainer.accumulate_grad_batches, the batches of one optimizer step, at the start of every epoch.

    Args:
        scheduling: the number of batches to accumulate from every epoch (from 0) on, such as {0: 8, 4: 4, 8: 1}. Before the
            first of them every batch is a step.

    Raises:
        TypeError, ValueError: an epoch or a number of batches is not accepted.
        ValueError: from fit, under manual optimization, or with the Trainer's accumulate_grad_batches.

    >>> accumulation = tw.GradientAccumulationScheduler({0: 4, 2: 1})
    >>> trainer = tw.Trainer(callbacks=accumulation, max_epochs=3, enable_model_summary=False)
    >>> trainer.fit(module, loader)  # 8 batches an epoch
    >>> trainer.global_step
    12
    """

    @refuses_unknown
    def __init__(self, scheduling: dict[int, int]) -> None:
        if not isinstance(scheduling, dict) or not scheduling:
            raise TypeError(f"scheduling={scheduling!r}: pass a dict of epoch and number of batches: {{0: 8, 4: 1}}.")
        for epoch, batches in scheduling.items():
            for name, value, least in (("epoch", epoch, 0), ("number of batches", batches, 1)):
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ValueError(f"scheduling has {value!r} as {name}; expected an integer of at least {least}.")
        self.scheduling = {0: 1, **scheduling}
        self._before: int | None = None

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return whether any epoch accumulates more than one batch."""
        return any(batches > 1 for batches in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the number of batches per step in an epoch."""
        return self.scheduling[max(start for start in self.scheduling if start <= epoch)]

    def on_fit_start(self, trainer: AnyTrainer, module: Module) -> None:
        if not module.automatic_optimization:
            raise ValueError(
                "GradientAccumulationScheduler needs automatic optimization: with automatic_optimization=False "
                "training_step itself decides when the optimizer steps. Leave the callback out."
            )
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and GradientAccumulationScheduler "
                "exclude each other; leave one of them out."
            )
        self._before = trainer.accumulate_grad_batches

    def on_train_epoch_start(self, trainer: AnyTrainer, module: Module) -> None:
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    def teardown(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        # The last number would make the next fit's on_fit_start refuse this callback.
        if self._before is not None:
            trainer.accumulate_grad_batches, self._before = self._before, None
