"""Merging the metrics of several ranks into one: sums, extremes and states of torchmetrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy

from trainwright.trainer.metrics import MetricCollector, merged


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


def test_one_state_is_kept_as_it_is_and_none_is_none() -> None:
    state: dict[str, Any] = {"values": [], "metrics": {}}
    assert merged([state], nn.Module())[0] is state
    assert merged([], nn.Module()) == (None, [])


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
