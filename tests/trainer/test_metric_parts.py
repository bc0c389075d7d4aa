"""A Metric that computes several numbers is logged as several names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import QUIET, Classifier, make_loader
from torchmetrics import ClasswiseWrapper, MeanMetric, MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

import trainwright as tw


class Judged(Classifier):
    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.metric.update(self.net(batch[0]), batch[1])
        self.log("acc", self.metric)

    on_validation_epoch_end = lambda self: None  # noqa: E731 - a hook that looks at the values has them reduced early


def metrics_of(metric: Any, loaders: Any = None) -> list[dict[str, float]]:
    return tw.Trainer(**QUIET).validate(Judged(metric), loaders or make_loader(), verbose=False)


def test_vectors_and_dicts_are_logged_by_part() -> None:
    whole = MulticlassAccuracy(3, average=None)
    module = Judged(whole)
    for batch in make_loader():
        whole.update(module.net(batch[0]), batch[1])
    expected = [round(each, 5) for each in whole.compute().tolist()]
    (vector,) = metrics_of(MulticlassAccuracy(3, average=None))
    assert [round(vector[f"acc_{number}"], 5) for number in range(3)] == expected
    (classes,) = metrics_of(ClasswiseWrapper(MulticlassAccuracy(3, average=None), labels=["a", "b", "c"]))
    assert [round(classes[f"acc_multiclassaccuracy_{name}"], 5) for name in "abc"] == expected
    (bounds,) = metrics_of(MinMaxMetric(MulticlassAccuracy(3)))
    assert set(bounds) == {"acc_raw", "acc_min", "acc_max"}
    first, second = metrics_of(MulticlassAccuracy(3, average=None), [make_loader(), make_loader(8)])
    assert len(first) == len(second) == 3
    assert not first.keys() & second.keys()


def test_what_is_no_row_of_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'acc' computes a tensor of shape \(3, 3\). Expected one number, a vector"):
        metrics_of(MulticlassConfusionMatrix(3))

    class Whole(Judged):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict(self.metric)

    with pytest.raises(
        TypeError, match=r"log_dict was given a ClasswiseWrapper, which is one Metric. Log it with self\.log"
    ):
        tw.Trainer(**QUIET).validate(Whole(ClasswiseWrapper(MulticlassAccuracy(3, average=None))), make_loader())
    assert torch.is_grad_enabled()


class Shares(Classifier):
    """Updates one Metric in training and in validation, and logs it as an object in the named stages."""

    def __init__(self, *logs: str) -> None:
        super().__init__()
        self.logs, self.mean, self.best = logs, MeanMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        value = self.mean(batch[0])
        self.log("train_mean", self.mean if "train" in self.logs else value, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = self.mean(batch[0])
        self.log("val_mean", self.mean if "validation" in self.logs else value)

    def on_validation_epoch_end(self) -> None:
        self.best.update(1.0)
        self.log("best", self.best.compute())


@pytest.mark.parametrize(("logs", "sanity", "batches"), [("validation", 2, 0), ("validation", 0, 11), ("train", 2, 11)])
def test_a_metric_object_of_two_stages_is_rejected(logs: str, sanity: int, batches: int) -> None:
    trainer = tw.Trainer(max_epochs=2, num_sanity_val_steps=sanity, **QUIET)
    with pytest.raises(ValueError, match=r"Metric 'mean' is updated in training and in validation.*self\.train_mean"):
        trainer.fit(Shares(logs), make_loader(), make_loader())
    assert trainer.global_step == batches


def test_a_metric_object_may_give_values_in_two_stages() -> None:
    module = Shares()
    tw.Trainer(max_epochs=2, **QUIET).fit(module, make_loader(), make_loader())
    assert module.best._update_count == 3  # one of the sanity check: nothing resets an object that is not logged
