"""WeightAveraging and EMAWeightAveraging: averaged weights for validation, in checkpoints, and at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.averaging import AverageFunction, Averaging, Fold, fold_of
from trainwright.callbacks.base import check_integers

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer


class WeightAveraging(Averaging):
    """Averages the weights during training, by default with equal weights, as torch's AveragedModel does.

    The module holds the averages during every validation of fit, and once the training has ended. They are the model of a
    checkpoint too, so that ModelCheckpoint's best weights are the scored weights. A resumed run continues from the weights
    in training, bitwise. Before the first update, all of these are the weights in training.

    It works under every strategy: every rank averages the pieces of the weights that it holds, and a run resumes under another
    strategy or number of processes. Averages of float16 and bfloat16 weights are in float32. Parameters that are frozen
    have no average until they train. Buffers of integers keep their latest value, and so do elements of a buffer
    that have no finite mean (a mask of -inf).

    Override `should_update` to choose the steps or epochs after which the average is updated.

    Args:
        device: where the averages are kept, or None for where the weights are. "cpu" saves memory of a GPU, and every update
            copies the weights there.
        use_buffers: average the floating-point buffers of the state_dict too, such as running statistics. If False,
            evaluations use the latest ones.
        avg_fn: called with an average, the weights and a 0-dim tensor, the number of updates before. It returns the new
            average. It has to be elementwise: a rank may hold a 1-D part of a tensor.
        multi_avg_fn: the same for lists of tensors on one device and of one dtype. It changes the averages.

    Raises:
        ValueError: both functions are given, or in fit another callback averages too.
        TypeError: a function cannot be called.

    >>> class FromSecondEpoch(tw.WeightAveraging):
    ...     def should_update(self, step_idx=None, epoch_idx=None):
    ...         return epoch_idx is not None and epoch_idx >= 1
    >>> tw.Trainer(callbacks=FromSecondEpoch(), max_epochs=3, enable_model_summary=False).fit(module, loader, val_loader)
    """

    @refuses_unknown
    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        *,
        avg_fn: AverageFunction | None = None,
        multi_avg_fn: Callable[[list[Tensor], list[Tensor], Tensor], None] | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ValueError("avg_fn and multi_avg_fn both say how to average; pass one of them.")
        for name, function in (("avg_fn", avg_fn), ("multi_avg_fn", multi_avg_fn)):
            if function is not None and not callable(function):
                raise TypeError(f"{name}={function!r} cannot be called; pass a function of averages and weights.")
        super().__init__(device, use_buffers)
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        self._latest_step, self._latest_update_epoch = 0, -1
        """The steps that should_update has decided on, and the latest epoch after which it updated."""

    def _fold(self) -> Fold:
        return fold_of(self._avg_fn, self._multi_avg_fn)

    @property
    def state_key(self) -> str:
        """Return one key for all subclasses, which differ in when they update: each continues the average of another."""
        return "WeightAveraging"

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average now, by default after every optimizer step.

        Args:
            step_idx: the number of an optimizer step of the latest batch, from 0, or None at an epoch's end. If a batch makes
                several steps, this is called for each, and one update follows.
            epoch_idx: the number of the epoch that ends, from 0, before the validation of its end, or None after a step.
        """
        return step_idx is not None

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        super().setup(trainer, module, stage)
        if stage == "fit":
            self._latest_step, self._latest_update_epoch = 0, -1

    def on_train_batch_end(self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._follow_step(trainer, module)

    def _follow_step(self, trainer: TrainerProtocol, module: Module) -> None:
        steps = range(self._latest_step, trainer.global_step)  # several, if a batch steps several optimizers
        self._latest_step = trainer.global_step
        due = [self.should_update(step_idx=each) for each in steps]  # each is decided on
        if any(due):
            self._update(trainer, module)

    def on_train_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        if not trainer.state.progress.is_leaving:  # a run that resumes within the epoch ends it
            self._follow_epoch(trainer, module)

    def _follow_epoch(self, trainer: TrainerProtocol, module: Module) -> None:
        epoch = trainer.current_epoch
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._update(trainer, module)
            self._latest_update_epoch = epoch

    def on_resume_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Make the update that was due when an earlier callback wrote the checkpoint that the run resumes from."""
        self._follow_step(trainer, module)

    def on_resume_start(self, trainer: AnyTrainer, module: Module) -> None:
        super().on_resume_start(trainer, module)
        if not self._is_loaded:
            self._latest_step = trainer.global_step

    def on_validation_start(self, trainer: AnyTrainer, module: Module) -> None:
        if not self._is_training:
            return
        if not trainer.sanity_checking and not trainer.state.progress.is_mid_epoch_validation:
            with torch.inference_mode(False):  # later updates change the averages
                self._follow_epoch(trainer, module)  # so that the epoch's checkpoint contains the scored weights
        self._show(trainer, module)

    def on_validation_end(self, trainer: AnyTrainer, module: Module) -> None:
        if self._is_training and self.n_averaged:
            self.pieces.put_back(trainer.strategy, module)

    def state_dict(self) -> dict[str, Any]:
        steps = {"latest_update_step": self._latest_step, "latest_update_epoch": self._latest_update_epoch}
        return {**super().state_dict(), **steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._latest_step = int(state["latest_update_step"])
        self._latest_update_epoch = int(state["latest_update_epoch"])


class EMAWeightAveraging(WeightAveraging):
    """Keeps an exponential moving average of the weights: average = decay * average + (1 - decay) * weights.

    It begins with the weights of the first update. For the rest see WeightAveraging.

    Args:
        device, use_buffers: as in WeightAveraging.
        decay: from 0 to 1.
        update_every_n_steps: update after every optimizer step whose number, from 0, is a multiple of this, or 0 for none.
        update_starting_at_step: the number of the first such step, from 0, or None for the first of the run.
        update_starting_at_epoch: update also at the end of every epoch from this number, from 0, on, or None for none. For
            updates only after epochs, pass update_every_n_steps=0.

    Raises:
        ValueError: decay, a step or an epoch is out of its range, or no update would be made.

    >>> averaging = tw.EMAWeightAveraging(decay=0.99, update_starting_at_step=4)
    >>> best = tw.ModelCheckpoint("runs/averaged", monitor="val_loss")
    >>> trainer = tw.Trainer(callbacks=[averaging, best], max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader, val_loader)  # val_loss and the checkpoint are of the averaged weights
    """

    @refuses_unknown
    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay={decay!r} is not accepted; pass a number from 0 (the latest weights) to 1.")
        if update_every_n_steps == 0 and update_starting_at_epoch is None:
            raise ValueError("update_every_n_steps=0 makes no update. Pass 1 or more, or update_starting_at_epoch.")
        super().__init__(device, use_buffers)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        check_integers(0, update_every_n_steps=update_every_n_steps)
        check_integers(0, update_starting_at_step=update_starting_at_step or 0)
        check_integers(0, update_starting_at_epoch=update_starting_at_epoch or 0)

    def _fold(self) -> Fold:
        fold: Fold = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
        return fold

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            every = self.update_every_n_steps
            return every > 0 and step_idx >= (self.update_starting_at_step or 0) and step_idx % every == 0
        start = self.update_starting_at_epoch
        return start is not None and epoch_idx is not None and epoch_idx >= start
