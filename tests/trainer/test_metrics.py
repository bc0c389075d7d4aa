"""self.log and metrics: names, reductions, dtypes, objects of torchmetrics, and merges of several ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small import QUIET, Classifier, loss_of, make_loader
from torch import Tensor, nn
from torchmetrics import MeanMetric, MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy

import trainwright as tw
from trainwright.trainer.metrics import MetricCollector, merged


def fit(log: Callable[[Any, Any, int, Tensor], None], **settings: Any) -> tw.Trainer:
    class Logging(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = loss_of(self.net, batch)
            log(self, batch, batch_idx, loss)
            return loss

    trainer = tw.Trainer(**{"max_epochs": 1, **QUIET, **settings})
    trainer.fit(Logging(), make_loader(42, 4))
    return trainer


def test_the_epoch_mean_is_weighted_by_the_batch_size() -> None:
    values: list[tuple[float, int]] = []

    def log(module: Any, batch: Any, index: int, loss: Tensor) -> None:
        values.append((loss.item(), len(batch[0])))
        module.log("mean", loss, on_epoch=True, on_step=False)
        module.log("total", len(batch[0]), on_epoch=True, on_step=False, reduce_fx="sum")
        module.log("least", loss, on_epoch=True, on_step=False, reduce_fx="min")
        module.log("most", loss, on_epoch=True, on_step=False, reduce_fx="max")
        module.log("unweighted", float(index), on_epoch=True, on_step=False, batch_size=1)

    trainer = fit(log)
    metrics = {name: trainer.run.logbook.monitored(name, "the test") for name in trainer.callback_metrics}
    assert [size for _, size in values] == [4] * 10 + [2]
    assert metrics["mean"] == pytest.approx(sum(value * size for value, size in values) / 42, rel=1e-12)
    assert (metrics["least"], metrics["most"]) == (min(values)[0], max(values)[0])
    assert metrics["total"] == 42
    assert metrics["unweighted"] == pytest.approx(5.0)


def test_unequal_leading_sizes_warn_and_name_the_remedy() -> None:
    class Odd(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", 1.0)

    with pytest.warns(UserWarning, match=r"leading sizes \[3, 5\].*batch_size="):
        tw.Trainer(**QUIET).validate(Odd(), [(torch.zeros(3, 8), torch.zeros(5))])


def test_numbers_of_other_kinds_are_logged() -> None:
    def log(module: Any, batch: Any, index: int, loss: Tensor) -> None:
        module.log("numpy", np.float32(2.0))
        module.log("flag", True)

    assert fit(log).callback_metrics["numpy"] == 2.0

    class Opaque(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", 1.0)

    with pytest.warns(UserWarning, match="found no tensor in this batch .an object"):
        tw.Trainer(**QUIET).validate(Opaque(), [object()])


class Judged(Classifier):
    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric.update(self.net(batch[0]), batch[1])
        self.log("acc", self.metric)

    on_validation_epoch_end = lambda self: None  # noqa: E731 - a hook that looks at the values has them reduced early


def test_a_metric_of_several_numbers_is_rejected_with_a_remedy() -> None:
    for average, metric in (
        ("a tensor of shape (3,)", MulticlassAccuracy(3, average=None)),
        ("a dict", MinMaxMetric(MulticlassAccuracy(3))),
    ):
        with pytest.raises(ValueError, match=rf"'acc' computes {re.escape(average)}. Expected one number.*log_dict"):
            tw.Trainer(**QUIET).validate(Judged(metric), make_loader(), verbose=False)
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


@pytest.mark.parametrize(
    ("logs", "sanity", "batches"), [("validation", 2, 11), ("validation", 0, 11), ("train", 2, 11)]
)
def test_a_metric_object_of_two_stages_is_rejected(logs: str, sanity: int, batches: int) -> None:
    trainer = tw.Trainer(max_epochs=2, num_sanity_val_steps=sanity, **QUIET)
    with pytest.raises(ValueError, match=r"Metric 'mean' is updated in training and in validation.*self\.train_mean"):
        trainer.fit(Shares(logs), make_loader(), make_loader())
    assert trainer.global_step == batches


def collected(numbers: list[float], module: nn.Module) -> MetricCollector:
    collector = MetricCollector(module)
    collector.hook = "training_step"
    for number in numbers:
        for name, reduce_fx in (("mean", "mean"), ("sum", "sum"), ("least", "min"), ("most", "max")):
            value = torch.tensor(number)
            settings = (False, None, False, True, reduce_fx, name == "sum", False, None, True, None, False)
            collector.log(name, value, settings, int(number))
    return collector


def totals(collector: MetricCollector) -> dict[str, tuple[float, float]]:
    return {logged.name: (float(logged.total()[0]), logged.total()[1]) for logged in collector.values.values()}


def test_values_of_three_ranks_become_one() -> None:
    module = nn.ModuleDict({"mean": MeanMetric(), "unused": MeanMetric()})
    module["mean"].update(1.0)
    shares = [[1.0, 2.0], [5.0, 3.0, 4.0], [8.0]]
    state, dropped = merged([collected(share, module).state_dict() for share in shares])
    assert dropped == ["mean"]
    taken = MetricCollector(module)
    taken.load_state_dict(state or {}, torch.device("cpu"))
    assert totals(taken) == totals(collected([number for share in shares for number in share], module))
    assert module["mean"].update_count == 0
    assert merged([]) == (None, [])
