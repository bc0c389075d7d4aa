"""One dtype of the module, the batch and the default within a step, and exceptions."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from small import ON_HOST, loss_of, make_data, make_net
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import trainwright as tw
from trainwright.precision import resolve_precision

DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
Pair = collections.namedtuple("Pair", ["left", "right"])


class OwnWay(nn.Module):
    """Overrides _apply as modules did before it knew of `recurse`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def _apply(self, fn: Any) -> Any:
        return super()._apply(fn)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.LSTM(4, 4))
        self.last = nn.Linear(4, 3)
        self.tied = nn.Linear(4, 3)
        self.tied.weight = self.last.weight
        self.own_way = OwnWay()
        self.accuracy = MetricCollection([MulticlassAccuracy(3)])
        self.mean = MeanMetric()
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_a_module_is_converted_in_place_and_its_metrics_are_not(name: str, dtype: torch.dtype) -> None:
    precision, net = resolve_precision(name, "cpu"), Net()
    net.mean.update(torch.tensor(1.0))
    parameters = list(net.parameters())
    precision.convert_module(net)
    assert all(mine is theirs for mine, theirs in zip(parameters, net.parameters(), strict=True))
    assert {parameter.dtype for parameter in net.parameters()} == {dtype}
    assert net.tied.weight is net.last.weight
    assert net.first[1].running_mean.dtype == dtype
    assert (net.count.dtype, net.phase.dtype) == (torch.int64, torch.complex64)
    assert net.first[1].num_batches_tracked.dtype == torch.int64
    assert net.mean.mean_value.dtype == net.mean.weight.dtype == torch.float32
    for _ in range(400):
        net.mean.update(torch.tensor(1.0, dtype=dtype))
    assert net.mean.weight == 401  # bfloat16 would have stopped at 256
    net.mean.reset()
    assert net.mean.mean_value.dtype == torch.float32


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_batches_of_every_structure_are_converted(name: str, dtype: torch.dtype) -> None:
    precision = resolve_precision(name, "cpu")
    assert precision.converts_batch
    assert not resolve_precision("bf16-mixed", "cpu").converts_batch
    numbers, labels = torch.ones(2), torch.arange(2)
    ordered = collections.OrderedDict(a=numbers, b=[labels, "text"])
    got = precision.convert_batch({"x": (numbers, labels), "pair": Pair(numbers, None), "more": ordered})
    assert got["x"][0].dtype == dtype
    assert got["x"][1] is labels
    assert type(got["pair"]) is Pair
    assert got["pair"].left.dtype == dtype
    assert type(got["more"]) is collections.OrderedDict
    assert got["more"]["a"].dtype == dtype
    assert got["more"]["b"] == [labels, "text"]


def test_the_default_dtype_within_a_step_and_while_a_module_is_made() -> None:
    precision = resolve_precision("bf16-true", "cpu")
    context = precision.forward_context()
    assert context is not None
    with context:
        with context, pytest.raises(ValueError, match="within"):
            raise ValueError("within")
        assert torch.ones(1).dtype == torch.bfloat16
    with precision.init_context():
        assert nn.Linear(1, 1).weight.dtype == torch.bfloat16
    with resolve_precision(32, "cpu").init_context():
        assert nn.Linear(1, 1).weight.dtype == torch.float32
    assert torch.ones(1).dtype == torch.float32


@pytest.mark.host
@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_a_loop_of_ones_own_trains_in_it(name: str, dtype: torch.dtype) -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST, precision=name)
    net = make_net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
    batch = make_data(16)[:]
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert net[0].weight.dtype == dtype
    assert loss.dtype == (torch.float64 if name == "64-true" else torch.float32)
    assert losses[-1] < 0.7 * losses[0]
