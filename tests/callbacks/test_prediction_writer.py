"""Predictions that a callback takes as they come: with the dataset's indices, on one process and on two ranks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, make_net
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import trainwright as tw

SAMPLES = 21  # in batches of 4: both ranks have three batches, the last of which has one sample


class Forward(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        outputs = self.net(batch.float().reshape(-1, 1).repeat(1, 8))
        return {"number": batch, "pair": (outputs, [outputs.to(torch.bfloat16)])}


class One(Forward):
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


def taken(loaders: Any, interval: str = "batch_and_epoch", module: Any = None) -> dict[str, Any]:
    writer = Taking(interval)
    trainer = tw.Trainer(callbacks=[writer], **QUIET)
    assert trainer.predict(module or One(), loaders, return_predictions=False) is None
    assert trainer.batch_indices is None
    return {"batches": writer.batches, "epochs": writer.epochs}


def written(folder: Path, loaders: Any, module: Any = None, **options: Any) -> Any:
    writer = tw.TensorPredictionWriter(folder, **options)
    tw.Trainer(callbacks=[writer], **QUIET).predict(module or Forward(), loaders, return_predictions=False)
    return tw.load_predictions(str(folder))


def job(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "plain": taken(numbers()),
        "shuffled": taken(numbers(shuffle=True, num_workers=2)),
        "single": taken(numbers(batch_size=None), "batch", module=One()),
        "several": taken([numbers(), numbers(3)], "epoch"),
        "files": written(folder / "plain", numbers()),
        "small files": written(folder / "small", numbers(shuffle=True, num_workers=1), file_megabytes=1e-4),
        "several files": written(folder / "several", [numbers(), numbers(3)], One()),
        "repeated": written(folder / "repeated", numbers(sampler=[5, 3, 5, 0, 3, 20, 5, 1, 3]), One()),
    }
    try:
        written(folder / "plain", numbers())
    except FileExistsError as error:
        found["refused"] = str(error)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the loader's in_order=False is ignored")
        found["out of order"] = taken(numbers(num_workers=1, in_order=False), "batch")
        found["iterable"] = taken(DataLoader(Numbers(), batch_size=4), "batch")
        found["iterable files"] = written(folder / "iterable", DataLoader(Numbers(), batch_size=4), One())
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
        check_files(found)


def check_files(found: dict[str, Any]) -> None:
    everything = torch.arange(100, 100 + SAMPLES)
    expected = Forward().predict_step(everything, 0)
    for name in ("files", "small files"):
        loaded = found[name]
        assert torch.equal(loaded["number"], everything)
        torch.testing.assert_close(loaded["pair"][0], expected["pair"][0])
        assert torch.equal(loaded["pair"][1][0], loaded["pair"][0].to(torch.bfloat16))
    assert [each.tolist() for each in found["several files"]] == [(2 * everything).tolist(), [200, 202, 204]]
    assert found["repeated"].tolist() == [200, 202, 206, 210, 240]
    assert torch.equal(found["iterable files"], 2 * everything)
    assert "holds the predictions of another run" in found["refused"]


def test_writer_stores_every_sample_once_on_one_process(tmp_path: Path) -> None:
    check([job(tmp_path)])
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) == 1
    assert len(list((tmp_path / "small").glob("*.safetensors"))) == 6


def test_writer_stores_every_sample_once_on_two_ranks(tmp_path: Path) -> None:
    check(run_job(job, 2, tmp_path))
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) == 2


def test_a_run_that_was_cut_off_leaves_no_predictions_and_may_be_repeated(tmp_path: Path) -> None:
    class Failing(One):
        def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
            if batch_idx == 3 and self.fails:
                raise OSError("cut off")
            return 2 * batch

    module = Failing()
    module.fails = True
    with pytest.raises(OSError, match="cut off"):
        written(tmp_path, numbers(), module, file_megabytes=1e-5)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    with pytest.raises(FileNotFoundError, match=r"has no predictions\.json, which .* at the end of predict"):
        tw.load_predictions(str(tmp_path))
    module.fails = False
    assert torch.equal(written(tmp_path, numbers(), module), 2 * torch.arange(100, 100 + SAMPLES))
    manifest = json.loads((tmp_path / "predictions.json").read_text())
    assert len(manifest["loaders"][0]["files"]) == 1


def test_wrong_uses_of_a_prediction_writer_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="write_interval='step' is unknown; choose from batch, epoch, batch_and_epoch"):
        tw.BasePredictionWriter("step")
    with pytest.raises(ValueError, match="file_megabytes=0 is not accepted; pass a number above 0"):
        tw.TensorPredictionWriter("here", file_megabytes=0)
    with pytest.raises(NotImplementedError, match="BasePredictionWriter has no write_on_batch_end"):
        tw.Trainer(callbacks=[tw.BasePredictionWriter()], **QUIET).predict(One(), numbers())

    def predict(name: str, outputs: Any) -> Any:
        module = One()
        module.predict_step = lambda batch, batch_idx: outputs(batch, batch_idx)  # type: ignore[method-assign]
        return written(tmp_path / name, numbers(), module)

    with pytest.raises(ValueError, match=r"a tensor of shape \(\) for a batch of 4 samples; .* a row for each sample"):
        predict("scalar", lambda batch, index: batch.sum())
    with pytest.raises(TypeError, match=r"a dict with another nest, row shape or dtype than before"):
        predict("nest", lambda batch, index: {str(index): batch})
    with pytest.raises(TypeError, match=r"a str with another nest, .* or with more than tensors"):
        predict("text", lambda batch, index: "text")
    with pytest.raises(TypeError, match="pad rows of different lengths"):
        predict("shapes", lambda batch, index: torch.zeros(len(batch), 1 + index % 2))


def test_a_trial_run_writes_no_predictions(tmp_path: Path) -> None:
    for trial in (True, False):
        trainer = tw.Trainer(fast_dev_run=trial, callbacks=tw.TensorPredictionWriter(tmp_path / "scores"), **QUIET)
        trainer.predict(Forward(), numbers(), return_predictions=False)
        assert (tmp_path / "scores").exists() is not trial
    assert torch.equal(tw.load_predictions(tmp_path / "scores")["number"], torch.arange(100, 100 + SAMPLES))
