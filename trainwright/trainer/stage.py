"""Stages: the data of training, validation, test and prediction as users see them on the Trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from trainwright.data.combined import ShardedCombination
from trainwright.data.loaders import ShardedLoader

Shard = ShardedLoader | ShardedCombination
"""This rank's part of one of the user's loaders."""
Batches = int | float
"""A number of batches. math.inf if only the loader's end shows it."""


@dataclass
class Stage:
    """The data of one stage of evaluation."""

    dataloaders: Any = None
    """The loaders as the user passed them, or as the hook returned them."""
    num_batches: list[Batches] = field(default_factory=list)
    """Batches to run of every loader."""
    batch_indices: list[Any] | None = None
    """The dataset's indices of the samples of the current batch. None if its loader has none."""

    def note(self, dataloaders: Any, num_batches: list[int | None]) -> None:
        """Record the loaders and their numbers of batches, None if unknown."""
        self.dataloaders = dataloaders
        self.num_batches = [float("inf") if count is None else count for count in num_batches]

    def note_indices(self, indices: list[Any] | None) -> None:
        """Record the samples of the current batch."""
        self.batch_indices = indices


@dataclass
class Stages:
    """The data of every stage."""

    train_dataloader: Any = None
    num_training_batches: Batches = float("inf")
    validation: Stage = field(default_factory=Stage)
    sanity_check: Stage = field(default_factory=Stage)
    test: Stage = field(default_factory=Stage)
    predict: Stage = field(default_factory=Stage)

    def note_training(self, dataloader: Any, num_batches: Batches) -> None:
        """Record the training loaders, and the batches of an epoch on this rank."""
        self.train_dataloader = dataloader
        self.num_training_batches = num_batches


def limited(length: int | None, limit: int | float | None) -> int | None:
    """Return how many batches a limit leaves: a number of them, a fraction of a known length, or all (None)."""
    if limit is None:
        return length
    if isinstance(limit, float):
        if limit == 1.0:
            return length
        if length is None:
            raise ValueError(
                f"a limit of {limit} is a fraction of the batches, but this loader has no length. Pass a number of batches."
            )
        if limit > 0 and length > 0 and int(length * limit) == 0:
            raise ValueError(
                f"a limit of {limit} of {length} batches is less than one. Pass a number of batches, or at least "
                f"{math.ceil(1000 / length) / 1000}."
            )
        return int(length * limit)
    return limit if length is None else min(limit, length)
