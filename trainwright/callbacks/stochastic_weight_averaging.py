"""StochasticWeightAveraging: the mean of the weights at the starts of the last epochs, with its own learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.swa_utils import SWALR

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.averaging import LOW, AverageFunction, Averaging, Fold, fold_of
from trainwright.callbacks.base import check_integers
from trainwright.rank_zero import rank_zero_warn
from trainwright.tensor_names import clean_name, names_of

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class StochasticWeightAveraging(Averaging):
    """Averages the weights over the last epochs.

    The method is of Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization" (UAI 2018). From
    the first of these epochs on, torch's SWALR replaces the module's scheduler: it anneals the learning rates
    to `swa_lrs`. The average is of the weights with which each of these epochs begins.

    Once the training has ended, the module gets the average. The statistics of batch norm are computed again as the mean over
    the batches of the training data. For this training_step runs on each of them, without gradients, hooks and logging.
    During the training, validations and checkpoints have the weights in training. The average is stored apart.
    Afterwards `trainer.validate` scores the average and `trainer.save_checkpoint` saves it.

    It works under every strategy, where every rank averages the pieces of the weights that it holds, and resumes bitwise.

    Args:
        swa_lrs: the learning rate to anneal to, or one for every parameter group.
        swa_epoch_start: the first epoch to average, counted from 1. A float is a fraction of max_epochs, rounded down.
        annealing_epochs: over how many epochs the learning rates change, or 0 for at once.
        annealing_strategy: "cos" or "linear".
        avg_fn: called with an average, the weights and a 0-dim tensor, the number of updates before. It returns the new
            average. It has to be elementwise: a rank may hold a 1-D part of a tensor. None for the equal mean.
        device: where the average is kept, or None for where the weights are.

    Raises:
        TypeError, ValueError: an argument is not accepted, or in fit several optimizers, schedulers, manual optimization or a
            fraction of epochs without a limit.

    >>> averaging = tw.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
    >>> trainer = tw.Trainer(callbacks=averaging, max_epochs=3, log_every_n_steps=8, enable_model_summary=False)
    >>> trainer.fit(module, loader)  # the module has the average of the last two epochs' weights
    >>> trainer.optimizers[0].param_groups[0]["lr"]
    0.05
    """

    _is_model = False

    @refuses_unknown
    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: AverageFunction | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:
        rates = swa_lrs if isinstance(swa_lrs, (list, tuple)) else [swa_lrs]
        if not rates or not all(_is_rate(rate) for rate in rates):
            raise ValueError(f"swa_lrs={swa_lrs!r} is not accepted; pass a rate above 0, or a list of them.")
        is_fraction = isinstance(swa_epoch_start, float) and 0 <= swa_epoch_start <= 1
        if not is_fraction and (type(swa_epoch_start) is not int or swa_epoch_start < 1):
            raise ValueError(
                f"swa_epoch_start={swa_epoch_start!r} is not accepted; pass the number of an epoch, from 1, or a fraction of "
                "the epochs (a float from 0 to 1)."
            )
        check_integers(0, annealing_epochs=annealing_epochs)
        if annealing_strategy not in ("cos", "linear"):
            raise ValueError(f"annealing_strategy={annealing_strategy!r} is unknown; choose from cos, linear.")
        if avg_fn is not None and not callable(avg_fn):
            raise TypeError(f"avg_fn={avg_fn!r} cannot be called; pass a function of an average, weights and a number.")
        super().__init__(device, use_buffers=False)
        self._swa_lrs, self._swa_epoch_start, self._avg_fn = list(rates), swa_epoch_start, avg_fn
        self._annealing_epochs, self._annealing_strategy = annealing_epochs, annealing_strategy
        self._swa_scheduler: SWALR | None = None
        self._latest_update_epoch = -1

    def _fold(self) -> Fold:
        return fold_of(self._avg_fn)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_swa_scheduler": None}  # it holds the optimizer

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        super().setup(trainer, module, stage)
        if stage == "fit":
            self._swa_scheduler, self._latest_update_epoch = None, -1
            self._start = self._first_epoch(trainer)

    def _first_epoch(self, trainer: TrainerProtocol) -> int:
        start = self._swa_epoch_start
        if isinstance(start, float):
            if trainer.max_epochs in (None, -1):
                raise ValueError(
                    f"swa_epoch_start={start} is a fraction of the epochs, but max_epochs sets no limit; pass the number of an "
                    "epoch (int), or max_epochs."
                )
            start = int((trainer.max_epochs or 0) * start + 1e-9)  # 100 * 0.29 is a little below 29
        return max(start - 1, 0)

    def on_fit_start(self, trainer: AnyTrainer, module: Module) -> None:
        name = type(self).__name__
        if not module.automatic_optimization:
            raise ValueError(
                f"{name} steps a scheduler and runs training_step without gradients, but this module has "
                "automatic_optimization = False; average with torch.optim.swa_utils in it, or use WeightAveraging."
            )
        if len(trainer.optimizers) != 1 or len(trainer.lr_scheduler_configs) > 1:
            raise ValueError(
                f"{name} needs one optimizer and at most one scheduler, but configure_optimizers returned "
                f"{len(trainer.optimizers)} and {len(trainer.lr_scheduler_configs)}. Leave the others out, or use "
                "WeightAveraging."
            )
        groups = len(trainer.optimizers[0].param_groups)
        if len(self._swa_lrs) not in (1, groups):
            raise ValueError(
                f"swa_lrs has {len(self._swa_lrs)} rates, but the optimizer has {groups} parameter groups; pass one rate, or "
                "one for each group."
            )

    def configure_lr_scheduler(self, trainer: AnyTrainer, module: Module, optimizer: Optimizer) -> Any:
        # Until the first average the module's scheduler stays.
        if self._swa_scheduler is None and self.n_averaged:
            rates: Any = self._swa_lrs if len(self._swa_lrs) > 1 else self._swa_lrs[0]
            self._swa_scheduler = SWALR(optimizer, rates, self._annealing_epochs, self._annealing_strategy)
        return self._swa_scheduler

    def on_train_epoch_start(self, trainer: AnyTrainer, module: Module) -> None:
        super().on_train_epoch_start(trainer, module)
        epoch = trainer.current_epoch
        if epoch < self._start or epoch <= self._latest_update_epoch:
            return
        self._update(trainer, module)
        self._latest_update_epoch = epoch

    def on_before_train_end(self, trainer: AnyTrainer, module: Module, run_epoch: Callable[[], bool]) -> None:
        if not self.n_averaged and not trainer.fast_dev_run:
            rank_zero_warn(
                f"StochasticWeightAveraging averaged nothing: it begins after {self._start} epochs, and the run had "
                f"{trainer.current_epoch}; pass a smaller swa_epoch_start, or train longer.",
                stacklevel=2,
            )
        norms = ((clean_name(name), each) for name, each in module.named_modules() if isinstance(each, _BatchNorm))
        layers = {name: norm for name, norm in norms if norm.num_batches_tracked is not None and norm.training}
        names_by_tensor = names_of(module)
        names = {names_by_tensor[each] for layer in layers.values() for each in _statistics(layer)}
        if self._show(trainer, module, names) and layers:
            _renew(layers, run_epoch, trainer.engine.reduce)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "latest_update_epoch": self._latest_update_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._latest_update_epoch = int(state["latest_update_epoch"])


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


@torch.no_grad()
def _renew(
    layers: Mapping[str, _BatchNorm], run_epoch: Callable[[], bool], reduce: Callable[[Tensor, str], Tensor]
) -> None:
    """Compute the statistics of batch norm again, as the mean over the batches of all ranks. Collective."""
    before = {name: ([each.clone() for each in _statistics(layer)], layer.momentum) for name, layer in layers.items()}
    try:
        for layer in layers.values():
            layer.reset_running_stats()
            layer.momentum = None  # the mean of all batches
        run_epoch()
    finally:
        for name, layer in layers.items():
            layer.momentum = before[name][1]
    for name, layer in layers.items():
        *means, count = _statistics(layer)
        total = reduce(count.float(), "sum")
        for value in means:
            wide = value.float() if value.dtype in LOW else value
            # Weighted by the batches of every rank, which may differ by one.
            value.copy_(reduce(wide * count, "sum") / total)
        count.copy_(total)
        if not total:  # training_step does not use the layer, or the loader can be read only once
            for value, kept in zip(_statistics(layer), before[name][0], strict=True):
                value.copy_(kept)


def _statistics(layer: _BatchNorm) -> list[Tensor]:
    return [getattr(layer, name) for name in STATISTICS]
