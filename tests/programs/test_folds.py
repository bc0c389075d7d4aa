"""Folds of scikit-learn's KFold: three fits and validations in one job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, Classifier, make_data
from torch.utils.data import DataLoader, Subset

import trainwright as tw

pytest.importorskip("sklearn")
pytestmark = pytest.mark.slow
SAMPLES = 61


class Validated(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


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
        module = Validated()
        trainer.fit(module, train, held_out)
        (found,) = trainer.validate(module, held_out, ckpt_path="best", verbose=False)
        assert found["val_loss"] == pytest.approx(float(best.best_model_score), abs=1e-5)
        losses.append(found["val_loss"])
    return losses


def on_two_ranks(folder: Path) -> dict[str, Any]:
    return {name: folds(folder, name, 2) for name in ("auto", "fsdp", "deepspeed")}


def test_folds_are_trained(tmp_path: Path) -> None:
    alone = folds(tmp_path, "auto", 4)
    for found in run_job(on_two_ranks, 2, tmp_path / "job", seconds=300):
        for strategy in ("auto", "fsdp", "deepspeed"):
            assert found[strategy] == pytest.approx(alone, abs=1e-5), strategy
