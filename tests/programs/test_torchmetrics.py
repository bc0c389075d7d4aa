"""Collections and wrappers of torchmetrics, logged as objects and as values, over all samples of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, Classifier, make_loader
from torchmetrics import BootStrapper, ClasswiseWrapper, MetricCollection, MinMaxMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassRecall,
)

import trainwright as tw

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")]
SAMPLES = 65


class Measured(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.collection = MetricCollection({"acc": MulticlassAccuracy(3), "f1": MulticlassF1Score(3)}, prefix="val_")
        self.per_class = MulticlassAccuracy(3, average=None)
        self.bounds = MinMaxMetric(MulticlassAccuracy(3))
        self.classwise = ClasswiseWrapper(MulticlassRecall(3, average=None))
        self.strapped = BootStrapper(MulticlassAccuracy(3), num_bootstraps=4)
        self.confusion = MulticlassConfusionMatrix(3)
        self.matrix = torch.zeros(0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found, expected = self.net(batch[0]), batch[1]
        for each in (self.collection, self.per_class, self.bounds, self.classwise, self.strapped, self.confusion):
            each.update(found, expected)
        self.log_dict(self.collection)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"acc_of_{number}": each for number, each in enumerate(self.per_class.compute())})
        self.log_dict(self.strapped.compute())
        self.log_dict({f"bounds_{name}": value for name, value in self.bounds.compute().items()})
        self.log_dict({f"class_{name}": value for name, value in self.classwise.compute().items()})
        self.matrix = self.confusion.compute()
        for each in (self.per_class, self.bounds, self.classwise, self.strapped, self.confusion):
            each.reset()


def measured(folder: Path) -> dict[str, Any]:
    module = Measured()
    trainer = tw.Trainer(**{**QUIET, "devices": "auto"})
    (values,) = trainer.validate(module, make_loader(SAMPLES), verbose=False)
    values = {name: float(each) for name, each in values.items() if not name.startswith(("mean", "std"))}
    return {"values": values, "matrix": module.matrix, "names": sorted(trainer.callback_metrics)}


def test_torchmetrics_are_equal_on_one_process_and_two(tmp_path: Path) -> None:
    alone = measured(tmp_path)
    assert alone["matrix"].sum() == SAMPLES
    names = {"val_acc", "val_f1", "bounds_raw", "bounds_min", "bounds_max", "acc_of_2", "class_multiclassrecall_1"}
    assert {*names, "mean", "std"} <= set(alone["names"])
    for found in run_job(measured, 2, tmp_path / "job"):
        assert torch.equal(found["matrix"], alone["matrix"])
        assert found["names"] == alone["names"]
        assert found["values"] == pytest.approx(alone["values"], abs=1e-6)
