"""Types of the arguments and results of hooks and steps, most of them under the names that Lightning's users annotate with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

AnyTrainer: TypeAlias = Any
"""The Trainer of a hook or a module. Users may annotate it with `tw.Trainer` or with `tw.callbacks.TrainerProtocol`."""
STEP_OUTPUT: TypeAlias = Tensor | Mapping[str, Any] | None
"""What a step returns: a loss, a dict with one under "loss", or None to skip the batch."""
TRAIN_DATALOADERS: TypeAlias = Any
EVAL_DATALOADERS: TypeAlias = Any
"""A loader, or a nested structure of them."""
LRSchedulerTypeUnion: TypeAlias = LRScheduler
LRSchedulerPLType: TypeAlias = LRScheduler
OptimizerLRSchedulerConfig: TypeAlias = Mapping[str, Any]
"""A dict with "optimizer", and if it has a scheduler "lr_scheduler"."""
OptimizerLRScheduler: TypeAlias = (
    Optimizer
    | Sequence[Optimizer]
    | tuple[Sequence[Optimizer], Sequence[LRScheduler | Mapping[str, Any]]]
    | OptimizerLRSchedulerConfig
    | Sequence[OptimizerLRSchedulerConfig]
    | None
)
"""What configure_optimizers returns."""
