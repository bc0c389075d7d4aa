"""BasePredictionWriter: the base of callbacks that write the outputs of predict_step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback
from trainwright.data.transfer import to_device
from trainwright.distributed.vendor import count_issued

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

INTERVALS = ("batch", "epoch", "batch_and_epoch")
HOST = torch.device("cpu")


class BasePredictionWriter(Callback):
    """The base of prediction writers: override `write_on_batch_end`, `write_on_epoch_end` or both.

    Predict with return_predictions=False, so that the predictions are not collected too.

    Every rank gets different batches. Together they are the whole dataset, with every sample once.

    Args:
        write_interval: "batch", "epoch" (this rank's predictions are kept on the host until then) or "batch_and_epoch".

    Raises:
        ValueError: the interval is unknown.
        NotImplementedError: from predict, if the method of the interval is not overridden.

    >>> class SaveBatches(tw.BasePredictionWriter):
    ...     def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
    ...         torch.save(prediction, f"{trainer.global_rank}-{batch_idx}.pt")
    >>> tw.Trainer(callbacks=SaveBatches()).predict(module, test_loader, return_predictions=False)
    >>> torch.load("0-7.pt").shape
    torch.Size([4, 3])
    """

    @refuses_unknown
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
        trainer: AnyTrainer,
        module: Module,
        prediction: Any,
        batch_indices: list[Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Called after every batch on its rank. If it communicates, also on a rank without batches, with a dummy batch.

        `batch_indices` are the dataset indices of the samples, or None if the loader has none: an iterable dataset, a list
        of batches, several loaders combined.
        """
        raise NotImplementedError(f"{type(self).__name__} has no write_on_batch_end, but write_interval needs it.")

    def write_on_epoch_end(
        self, trainer: AnyTrainer, module: Module, predictions: list[Any], batch_indices: list[list[Any]]
    ) -> None:
        """Called once, with this rank's predictions: a list of batches, with several loaders a list of such lists.

        `batch_indices` has a list for every loader, with an entry for every batch.
        """
        raise NotImplementedError(f"{type(self).__name__} has no write_on_epoch_end, but write_interval needs it.")

    def on_predict_epoch_start(self, trainer: AnyTrainer, module: Module) -> None:
        loaders = len(trainer.num_predict_batches)
        self._predictions, self._indices = [[] for _ in range(loaders)], [[] for _ in range(loaders)]

    def on_predict_batch_end(
        self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        # A dummy batch is written only if writing communicates: other ranks would wait.
        indices, is_own = trainer.batch_indices, not trainer.is_dummy_batch
        if self.write_interval != "epoch" and (is_own or self._communicates):
            before = count_issued() if batch_idx == 0 else None
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
            if before is not None and is_own:
                self._communicates = count_issued() != before
        if self.write_interval != "batch" and is_own:
            self._predictions[dataloader_idx].append(to_device(outputs, HOST))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        predictions, indices, self._predictions, self._indices = self._predictions, self._indices, [], []
        if self.write_interval != "batch":
            self.write_on_epoch_end(trainer, module, predictions[0] if len(predictions) == 1 else predictions, indices)
