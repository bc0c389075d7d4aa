"""Folds of scikit-learn's KFold, three fits and validations in one job, and its report over the predictions of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, Classifier, make_data
from torch import Tensor
from torch.utils.data import DataLoader, Subset

import trainwright as tw

pytest.importorskip("sklearn")
pytestmark = pytest.mark.slow
SAMPLES = 61


class Predicts(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).argmax(-1)


def folds(folder: Path, strategy: str, batch_size: int) -> list[float]:
    from sklearn.model_selection import KFold

    data, losses = make_data(SAMPLES), []
    for number, (training, held) in enumerate(KFold(3, shuffle=True, random_state=0).split(range(SAMPLES))):
        options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
        train = DataLoader(Subset(data, training.tolist()), batch_size=batch_size, **options)
        held_out = DataLoader(Subset(data, held.tolist()), batch_size=batch_size, **options)
        stops = tw.EarlyStopping("val_loss", patience=1)
        best = tw.ModelCheckpoint(folder / f"{strategy}-{number}", monitor="val_loss")
        settings = {**QUIET, "enable_checkpointing": True, "devices": "auto", "strategy": strategy}
        trainer = tw.Trainer(max_epochs=3, callbacks=[stops, best], **settings)
        module = Predicts()
        trainer.fit(module, train, held_out)
        (found,) = trainer.validate(module, held_out, ckpt_path="best", verbose=False)
        assert found["val_loss"] == pytest.approx(float(best.best_model_score), abs=1e-5)
        losses.append(found["val_loss"])
    return losses


def report(folder: Path, batch_size: int) -> dict[str, Any]:
    from sklearn.metrics import classification_report

    data = make_data(SAMPLES)
    settings = {**QUIET, "devices": "auto", "precision": "16-mixed", "accumulate_grad_batches": 4}
    trainer, module = tw.Trainer(max_epochs=4, **settings), Predicts()
    trainer.fit(module, DataLoader(data, batch_size=batch_size, shuffle=True))
    steps = trainer.global_step
    predicted = trainer.predict(module, DataLoader(data, batch_size=batch_size))
    told = classification_report(data.tensors[1], torch.cat(predicted), output_dict=True, zero_division=0.0)
    return {"steps": steps, "told": told["weighted avg"]}


def on_two_ranks(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {name: folds(folder, name, 2) for name in ("auto", "fsdp", "deepspeed")}
    return {**found, "report": report(folder, 4)}


def test_folds_are_trained_and_reported(tmp_path: Path) -> None:
    alone, told = folds(tmp_path, "auto", 4), report(tmp_path, 8)
    assert told["steps"] == 4 * 2
    assert told["told"]["support"] == SAMPLES
    for found in run_job(on_two_ranks, 2, tmp_path / "job", seconds=300):
        for strategy in ("auto", "fsdp", "deepspeed"):
            assert found[strategy] == pytest.approx(alone, abs=1e-5), strategy
        assert found["report"]["steps"] == told["steps"]
        assert found["report"]["told"]["f1-score"] == pytest.approx(told["told"]["f1-score"], abs=0.05)
