"""BasePredictionWriter: receives predictions batch by batch, with the dataset indices of their samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainwright.callbacks.base import Callback
from trainwright.data.transfer import to_device
from trainwright.distributed import collectives

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.trainer.trainer import Trainer

INTERVALS = ("batch", "epoch", "batch_and_epoch")
HOST = torch.device("cpu")


class BasePredictionWriter(Callback):
    """Override `write_on_batch_end`, `write_on_epoch_end` or both, and predict with return_predictions=False.

    Each rank gets its own batches; together they are the whole dataset, each sample once.

    Args:
        write_interval: "batch", "epoch" (this rank's predictions are kept on the host until then) or "batch_and_epoch".

    Raises:
        ValueError: another interval.
    """

    def __init__(self, write_interval: str = "batch") -> None:
        if write_interval not in INTERVALS:
            raise ValueError(f"write_interval={write_interval!r} is unknown; choose from {', '.join(INTERVALS)}.")
        self.write_interval = write_interval
        self._predictions: list[list[Any]] = []
        self._indices: list[list[Any]] = []
        self._communicates = False
        """Whether write_on_batch_end communicates, as seen in this rank's first batch."""

    def write_on_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        prediction: Any,
        batch_indices: list[Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Called after each batch on its rank; if it communicates, also on a rank without batches left, with a dummy batch.

        `batch_indices` are the dataset indices of the batch's samples; None if the loader has none: an iterable dataset, a list
        of batches, several loaders combined, a step that takes dataloader_iter.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no write_on_batch_end, which its write_interval asks for."
        )

    def write_on_epoch_end(
        self, trainer: Trainer, module: Module, predictions: list[Any], batch_indices: list[list[Any]]
    ) -> None:
        """Called once, with this rank's predictions: a list of batches, with several loaders a list of such lists.

        `batch_indices` has a list for each loader, with an entry for each batch.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no write_on_epoch_end, which its write_interval asks for."
        )

    def on_predict_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Reset what is of the previous run."""
        loaders = len(trainer.num_predict_batches)
        self._predictions, self._indices = [[] for _ in range(loaders)], [[] for _ in range(loaders)]

    def on_predict_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Write the batch, or keep it; write a dummy batch only if writing communicates."""
        indices, is_own = trainer.batch_indices, not trainer.is_dummy_batch
        if self.write_interval != "epoch" and (is_own or self._communicates):
            before = collectives.count_issued() if batch_idx == 0 else None
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
            if before is not None and is_own:
                self._communicates = collectives.count_issued() != before
        if self.write_interval != "batch" and is_own:
            self._predictions[dataloader_idx].append(to_device(outputs, HOST))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Write what was kept."""
        if self.write_interval == "batch":
            return
        predictions, indices = self._predictions, self._indices
        self._predictions, self._indices = [], []
        self.write_on_epoch_end(trainer, module, predictions[0] if len(predictions) == 1 else predictions, indices)
