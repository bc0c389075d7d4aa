"""self.log and metrics: names, reductions, dtypes, objects of torchmetrics, and merges of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small import QUIET, Classifier, loss_of, make_loader
from torch import Tensor, nn
from torchmetrics import CatMetric, ClasswiseWrapper, MaxMetric, MeanMetric, MinMaxMetric, PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

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


def test_metrics_have_the_precision_that_was_logged() -> None:
    """Users compare them with their tensors, so values for comparisons and files are not rounded."""

    def log(module: Any, batch: Any, index: int, loss: Tensor) -> None:
        for name, value in (("single", loss), ("half", loss.bfloat16()), ("double", loss.double()), ("number", 0.1)):
            module.log(name, value, on_step=name != "number", on_epoch=name != "half")

    trainer = fit(log)
    for metrics in (trainer.callback_metrics, trainer.logged_metrics):
        kinds = {name: value.dtype for name, value in metrics.items()}
        assert {name: kind for name, kind in kinds.items() if kind != torch.float32} == {
            name: torch.float64 for name in kinds if name.startswith("double")
        }
    assert trainer.run.logbook.monitored("number", "the test") == pytest.approx(0.1, rel=1e-12)
    assert torch.allclose(trainer.callback_metrics["single"], trainer.callback_metrics["double"].float())


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


# -- metrics of several numbers ------------------------------------------------------------------------------------------


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


# -- metrics of several ranks --------------------------------------------------------------------------------------------


class Measures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="macro")
        self.mean, self.most, self.all = MeanMetric(), MaxMetric(), CatMetric()
        self.correlation = PearsonCorrCoef()

    def see(self, numbers: list[float]) -> None:
        values = torch.tensor(numbers)
        self.accuracy.update(values.long() % 3, values.long() % 2)
        for metric in (self.mean, self.most, self.all):
            metric.update(values)


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
    return {each.name: (float(each.total()[0]), each.total()[1]) for each in collector.values.values()}


def test_three_ranks_become_one() -> None:
    shares = [[1.0, 2.0], [5.0, 3.0, 4.0], [8.0]]
    states = []
    for share in shares:
        module = Measures()
        module.see(share)
        states.append(collected(share, module).state_dict())
    whole, together = Measures(), Measures()
    whole.see([number for share in shares for number in share])
    state, left_out = merged(states, together)
    assert left_out == []
    taken = MetricCollector(together)
    taken.load_state_dict(state or {}, torch.device("cpu"))
    assert totals(taken) == totals(collected([number for share in shares for number in share], whole))
    for name in ("accuracy", "mean", "most", "all"):
        assert torch.equal(getattr(together, name).compute(), getattr(whole, name).compute()), name


@pytest.mark.filterwarnings("ignore:The variance of predictions")
def test_what_does_not_say_how_is_named() -> None:
    states = []
    for _ in range(2):
        module = Measures()
        module.correlation.update(torch.rand(4), torch.rand(4))
        states.append(collected([1.0], module).state_dict())
    state, left_out = merged(states, Measures())
    assert left_out == ["correlation"]
    assert state is not None
    assert state["metrics"] == {}
