"""BasePredictionWriter gets every prediction with its indices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET
from torch.utils.data import DataLoader, IterableDataset

import trainwright as tw

SAMPLES = 21  # in batches of 4: both ranks have three batches, the last of which has one sample


class Doubling(tw.Module):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return 2 * batch


class Taking(tw.BasePredictionWriter):
    """Keeps its arguments."""

    def __init__(self, write_interval: str) -> None:
        super().__init__(write_interval)
        self.batches: list[tuple[Any, ...]] = []
        self.epochs: list[tuple[Any, Any]] = []

    def write_on_batch_end(
        self,
        trainer: Any,
        module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert (
            batch_indices is None
            or [100 + index for index in batch_indices] == torch.as_tensor(batch).reshape(-1).tolist()
        )
        self.batches.append((prediction, batch_indices, batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((predictions, batch_indices))


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100, 100 + SAMPLES))


def numbers(samples: int = SAMPLES, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(list(range(100, 100 + samples)), **{"batch_size": 4, **kwargs})


def taken(loaders: Any, interval: str = "batch_and_epoch") -> dict[str, Any]:
    writer = Taking(interval)
    trainer = tw.Trainer(callbacks=[writer], **QUIET)
    assert trainer.predict(Doubling(), loaders, return_predictions=False) is None
    assert trainer.batch_indices is None
    return {"batches": writer.batches, "epochs": writer.epochs}


def job(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "plain": taken(numbers()),
        "shuffled": taken(numbers(shuffle=True, num_workers=2)),
        "single": taken(numbers(batch_size=None), "batch"),
        "several": taken([numbers(), numbers(3)], "epoch"),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the loader's in_order=False is ignored")
        found["out of order"] = taken(numbers(num_workers=1, in_order=False), "batch")
        found["iterable"] = taken(DataLoader(Numbers(), batch_size=4), "batch")
    return found


def check(results: list[dict[str, Any]]) -> None:
    ranks = len(results)
    for name in ("plain", "shuffled"):
        indices = [index for found in results for _, each, _, _ in found[name]["batches"] for index in each]
        assert sorted(indices) == list(range(SAMPLES))
        assert (indices == sorted(indices)) is (name == "plain" and ranks == 1)
    for rank, found in enumerate(results):
        for prediction, indices, _, _ in found["plain"]["batches"]:
            assert prediction.tolist() == [2 * (100 + index) for index in indices]
        assert [index for _, _, index, _ in found["plain"]["batches"]] == list(range(6 // ranks))
        ((predictions, indices),) = found["plain"]["epochs"]
        assert [each.tolist() for each in predictions] == [each.tolist() for each, *_ in found["plain"]["batches"]]
        assert indices == [[each for _, each, _, _ in found["plain"]["batches"]]]
        assert [each for _, each, _, _ in found["single"]["batches"]] == [[i] for i in range(rank, SAMPLES, ranks)]
        ((predictions, indices),) = found["several"]["epochs"]
        assert found["several"]["batches"] == []
        assert [len(each) for each in predictions] == [len(each) for each in indices] == [6 // ranks, 1 - rank]
        assert {str(each) for _, each, _, _ in found["iterable"]["batches"]} == {"None"}
        assert [each for _, each, _, _ in found["out of order"]["batches"]] == [
            each for _, each, _, _ in found["plain"]["batches"]
        ]


def test_a_writer_gets_every_sample_once_on_one_process(tmp_path: Path) -> None:
    check([job(tmp_path)])


def test_a_writer_gets_every_sample_once_on_two_ranks(tmp_path: Path) -> None:
    check(run_job(job, 2, tmp_path))


def test_wrong_uses_of_a_prediction_writer_are_rejected() -> None:
    with pytest.raises(ValueError, match="write_interval='step' is unknown; choose from batch, epoch, batch_and_epoch"):
        tw.BasePredictionWriter("step")
    with pytest.raises(NotImplementedError, match="BasePredictionWriter has no write_on_batch_end"):
        tw.Trainer(callbacks=[tw.BasePredictionWriter()], **QUIET).predict(Doubling(), numbers())
