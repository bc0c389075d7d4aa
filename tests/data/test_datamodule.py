"""DataModule: its defaults, the loaders made of datasets, and copies that belong to no trainer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from trainwright.data.combined import CombinedLoader
from trainwright.data.datamodule import DataModule


class Digits(DataModule):
    def __init__(self, batch_size: int = 4, root: str = "data") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.train = TensorDataset(torch.arange(10))

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return {"clean": DataLoader(self.train), "noisy": [1, 2]}

    def test_dataloader(self) -> Any:
        return CombinedLoader([DataLoader(self.train), Stream()])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_the_defaults_do_nothing_and_a_missing_loader_is_named() -> None:
    data = DataModule()
    batch = {"x": torch.zeros(2)}
    data.prepare_data()
    data.setup("fit")
    data.teardown("fit")
    data.load_state_dict(data.state_dict())
    assert data.on_before_batch_transfer(batch, 0) is batch is data.on_after_batch_transfer(batch, 0)
    assert data.transfer_batch_to_device(batch, torch.device("meta"), 0)["x"].is_meta
    assert data.prepare_data_per_node
    assert data.trainer is None
    assert Digits().state_key == "Digits"
    for name in ("train", "val", "test", "predict"):
        with pytest.raises(NotImplementedError, match=f"DataModule defines no {name}_dataloader. Define it, or pass"):
            getattr(data, f"{name}_dataloader")()


def test_hyper_parameters_are_kept() -> None:
    assert dict(Digits(8).hparams) == {"batch_size": 8, "root": "data"}


def test_a_copy_belongs_to_no_trainer() -> None:
    data = Digits()
    data.trainer = object()  # type: ignore[assignment]
    for other in (copy.deepcopy(data), copy.copy(data), pickle.loads(pickle.dumps(data))):
        assert other.trainer is None
        assert other.batch_size == 4
        assert other.hparams == data.hparams
    assert data.trainer is not None


def test_from_datasets_makes_a_loader_of_each_dataset() -> None:
    dataset = TensorDataset(torch.arange(10))
    data = Digits.from_datasets(
        dataset, {"a": dataset, "b": dataset}, [dataset, Stream()], batch_size=5, root="elsewhere"
    )
    assert isinstance(data, Digits)
    assert dict(data.hparams) == {"batch_size": 5, "root": "elsewhere"}
    train, val, test = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    assert isinstance(train.sampler, RandomSampler)
    assert (train.batch_size, len(train)) == (5, 2)
    assert list(val) == ["a", "b"]
    assert isinstance(val["a"].sampler, SequentialSampler)
    assert [batch.tolist() for batch in test[1]] == [[0, 1, 2]]
    with pytest.raises(NotImplementedError, match="no predict_dataloader"):
        data.predict_dataloader()
    streamed = DataModule.from_datasets(Stream(), batch_size=3, num_workers=1)
    assert [batch.tolist() for batch in streamed.train_dataloader()] == [[0, 1, 2]]
    assert len(pickle.loads(pickle.dumps(data)).train_dataloader()) == 2
    with pytest.raises(TypeError, match="val_dataset has a DataLoader"):
        DataModule.from_datasets(dataset, train)
    with pytest.raises(TypeError, match="train_dataset has an int"):
        DataModule.from_datasets([dataset, 3])  # type: ignore[list-item]


def test_it_is_made_again_from_a_checkpoint(tmp_path: Any) -> None:
    stored = {"datamodule_hyper_parameters": {"batch_size": 9, "root": "there"}, "datamodule_hparams_name": "kwargs"}
    torch.save({"state_dict": {}, **stored}, tmp_path / "lightning.ckpt")
    assert Digits.load_from_checkpoint(tmp_path / "lightning.ckpt", root="here").hparams == {
        "batch_size": 9,
        "root": "here",
    }
