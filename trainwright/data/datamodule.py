"""DataModule: all of a task's data in one class, from the download to the loaders. Users subclass it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainwright.checkpoint.foreign_formats import read_weights
from trainwright.data.transfer import to_device
from trainwright.errors import a_type_of
from trainwright.hyperparameters import HyperParameters, build, classonly, read_hyper_parameters

if TYPE_CHECKING:
    from trainwright import Trainer

Datasets = Dataset[Any] | Sequence[Dataset[Any]] | Mapping[str, Dataset[Any]]
Self = TypeVar("Self", bound="DataModule")
STAGES = ("train", "val", "test", "predict")


class DataModule(HyperParameters):
    """The data of a task. Subclass it and define the loader methods that you need.

    The Trainer calls `prepare_data` and `setup` before it asks for loaders, and `teardown` after the run.

    >>> class Data(tw.DataModule):
    ...     def setup(self, stage):
    ...         self.samples = TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
    ...
    ...     def train_dataloader(self):
    ...         return DataLoader(self.samples, batch_size=4, shuffle=True)
    >>> tw.Trainer(max_epochs=1, enable_model_summary=False).fit(module, datamodule=Data())
    """

    trainer: Trainer | None = None
    """The trainer of the current run, or None outside a run."""
    prepare_data_per_node: bool = True
    """Whether `prepare_data` is called once per machine, or (False) once per job."""

    def prepare_data(self) -> None:
        """Download and convert the data. Called in one process while the others wait, so set no attributes here."""

    def setup(self, stage: str) -> None:
        """Build the datasets of a stage ("fit", "validate", "test" or "predict"). Called on every rank."""

    def teardown(self, stage: str) -> None:
        """Clean up after a stage. Called on every rank."""

    def train_dataloader(self) -> Any:
        """Return the training data: a DataLoader, an iterable of batches, or a list, tuple or dict of them."""
        raise NotImplementedError(self._missing("train_dataloader"))

    def val_dataloader(self) -> Any:
        """Return the validation data of fit and validate: one loader, or a list, tuple or dict of them."""
        raise NotImplementedError(self._missing("val_dataloader"))

    def test_dataloader(self) -> Any:
        """Return the data of test: one loader, or a list, tuple or dict of them."""
        raise NotImplementedError(self._missing("test_dataloader"))

    def predict_dataloader(self) -> Any:
        """Return the data of predict: one loader, or a list, tuple or dict of them."""
        raise NotImplementedError(self._missing("predict_dataloader"))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to move to the device. Called before `transfer_batch_to_device` on every rank."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on the device. Called on every rank."""
        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch for the step. Called after `transfer_batch_to_device` on every rank."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors for a checkpoint. Called at every save on every rank; rank 0's state is stored."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned. Called before a resumed run's first batch on every rank."""

    def on_exception(self, exception: BaseException) -> None:
        """Called after an exception or a keyboard interrupt ended the run, on the rank where it happened."""

    @property
    def state_key(self) -> str:
        """Return the name of the state in a checkpoint."""
        return type(self).__qualname__

    @classmethod
    def from_datasets(
        cls: type[Self],
        train_dataset: Datasets | None = None,
        val_dataset: Datasets | None = None,
        test_dataset: Datasets | None = None,
        predict_dataset: Datasets | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> Self:
        """Return a DataModule around datasets, sequences of datasets or dicts of datasets.

        The loaders have the same structure as the datasets.

        Args:
            train_dataset: is shuffled, unless it is an IterableDataset.
            val_dataset, test_dataset, predict_dataset: are read in order.
            batch_size, num_workers: settings of every loader, also passed to the class's constructor if it accepts them.
            datamodule_kwargs: arguments of the class's constructor.
        """
        parameters = inspect.signature(cls).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        sizes = {"batch_size": batch_size, "num_workers": num_workers}
        accepted = {name: value for name, value in sizes.items() if takes_all or name in parameters}
        datamodule = cls(**{**accepted, **datamodule_kwargs})
        datasets = dict(zip(STAGES, (train_dataset, val_dataset, test_dataset, predict_dataset), strict=True))
        for stage, dataset in datasets.items():
            if dataset is not None:
                _check_datasets(dataset, f"{stage}_dataset")
                make = partial(_make_loaders, dataset, shuffle=stage == "train", **sizes)
                setattr(datamodule, f"{stage}_dataloader", make)
        return datamodule

    @classonly
    def load_from_checkpoint(
        cls: type[Self],
        checkpoint_path: str | os.PathLike[str],
        map_location: Any = None,
        hparams_file: str | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make a DataModule with its hyper-parameters from a run's checkpoint.

        Args:
            checkpoint_path: a checkpoint of a Trainer, or a Lightning `.ckpt` file.
            map_location: ignored, because hyper-parameters are on the host.
            hparams_file: a JSON or YAML file whose hyper-parameters replace the checkpoint's.
            weights_only: ignored, because only plain data and tensors are ever read.
            kwargs: arguments of the constructor, which override saved values. Other names are dropped with a warning.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it contains more than plain data and tensors.
            TypeError: the constructor needs an argument that was not saved.
        """
        if hparams_file is not None:
            return build(cls, read_hyper_parameters(hparams_file), kwargs)
        weights = read_weights(checkpoint_path)
        forms = weights.datamodule_hyper_parameter_forms
        return build(cls, weights.datamodule_hyper_parameters, kwargs, weights.datamodule_hparams_name, forms)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy, without the trainer."""
        return {name: value for name, value in vars(self).items() if name != "trainer"}

    def _missing(self, name: str) -> str:
        return f"{type(self).__name__} defines no {name}. Define it, or pass the loaders to the Trainer."


def _make_loaders(datasets: Datasets, *, shuffle: bool, batch_size: int, num_workers: int) -> Any:
    def make(dataset: Dataset[Any]) -> DataLoader[Any]:
        shuffled = shuffle and not isinstance(dataset, IterableDataset)
        # torch rejects persistent_workers=True for a loader without workers.
        return DataLoader(dataset, batch_size, shuffled, num_workers=num_workers, persistent_workers=num_workers > 0)

    if isinstance(datasets, Mapping):
        return {name: make(dataset) for name, dataset in datasets.items()}
    return [make(dataset) for dataset in datasets] if isinstance(datasets, Sequence) else make(datasets)


def _check_datasets(datasets: Any, argument: str) -> None:
    values = datasets.values() if isinstance(datasets, Mapping) else datasets
    for dataset in values if isinstance(datasets, (Mapping, list, tuple)) else [datasets]:
        is_dataset = isinstance(dataset, (Dataset, Iterable)) or hasattr(dataset, "__getitem__")
        if not is_dataset or isinstance(dataset, (str, DataLoader)):
            raise TypeError(
                f"{argument} has {a_type_of(dataset)}. Pass a dataset (a torch Dataset, or anything with __getitem__ and "
                "__len__), or a list or dict of datasets."
            )
