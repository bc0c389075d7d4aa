"""Tuner: searches a learning rate or a batch size by hand, in trial runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.callbacks.batch_size_finder import BatchSizeFinder
from trainwright.callbacks.learning_rate_finder import LearningRateFinder, LearningRateSearch
from trainwright.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from trainwright.data.datamodule import DataModule
    from trainwright.module import Module
    from trainwright.trainer.trainer import Trainer


class Tuner:
    """Searches settings for a Trainer. The trials train copies of the module; the Trainer and the module stay as they are.

    Args:
        trainer: the trials have its arguments, but no loggers, callbacks and checkpoints.

    >>> trainer = tw.Trainer(max_epochs=1)
    >>> search = tw.Tuner(trainer).lr_find(module, loader, num_training=20, update_attr=False)
    >>> search.results["lr"][0]
    1e-08
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        **options: Any,
    ) -> LearningRateSearch | None:
        """Search a learning rate, set the module's attribute, and return the search; None with fast_dev_run. Collective.

        The arguments are those of `Trainer.fit`, and with `options` those of LearningRateFinder. `num_training` is its
        num_training_steps.

        Raises:
            AttributeError: with update_attr, the module has neither `lr` nor `learning_rate`, nor what attr_name names.
            ValueError: several optimizers, or another method than "fit".
        """
        data = _data_of("lr_find", method, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        if self._is_trial_run("learning rate"):
            return None
        finder = LearningRateFinder(min_lr, max_lr, num_training, **options)
        return finder.search(self._trainer.trial, model, data)

    def scale_batch_size(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        mode: str = "power",
        **options: Any,
    ) -> int | None:
        """Search the largest batch size that fits into memory, set the attribute, and return it; None with fast_dev_run.

        The arguments are those of `Trainer.fit`, and with `options` those of BatchSizeFinder, and so are the errors.
        """
        data = _data_of("scale_batch_size", method, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        if self._is_trial_run("batch size"):
            return None
        finder = BatchSizeFinder(mode, **options)
        return finder.search(self._trainer.trial, model, data)

    def _is_trial_run(self, what: str) -> bool:
        if self._trainer.fast_dev_run:
            rank_zero_warn(f"No {what} is searched with fast_dev_run.", stacklevel=3)
        return bool(self._trainer.fast_dev_run)


def _data_of(call: str, method: str, train: Any, val: Any, other: Any, datamodule: DataModule | None) -> dict[str, Any]:
    if method != "fit" or other is not None:
        raise ValueError(f"{call} searches only 'fit'. Omit method= and dataloaders=, and pass train_dataloaders=.")
    return {"train_dataloaders": train, "val_dataloaders": val, "datamodule": datamodule}
