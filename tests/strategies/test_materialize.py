"""Modules on the meta device get their initial values, and values that cannot be known are rejected by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainwright.engine.engine import Engine
from trainwright.precision import resolve_precision
from trainwright.strategies.base import Optimization
from trainwright.strategies.placement import innermost_first, materialize


class Scaled(nn.Module):
    """Draws a parameter in reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("steps", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        nn.init.zeros_(self.steps)


def transformer() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(7, 4, padding_idx=0),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        nn.MultiheadAttention(4, 2),
        nn.Linear(4, 7),
    )


def mixture() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), Scaled(), nn.LSTM(3, 4), nn.LayerNorm(4), nn.PReLU())


def tied() -> nn.Module:
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7))
    net[2].weight = net[0].weight
    return net


@pytest.mark.parametrize("make", [transformer, mixture, tied])
def test_values_are_those_of_real_modules(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    real = make()
    after = torch.rand(1)
    with torch.device("meta"):
        module = make()
    torch.manual_seed(3)
    materialize(module)
    assert torch.equal(torch.rand(1), after)
    assert module.state_dict().keys() == real.state_dict().keys()
    for name, value in real.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    for left, right in zip(module.parameters(), real.parameters(), strict=True):
        assert isinstance(left, nn.Parameter)
        assert (left.requires_grad, left.shape) == (right.requires_grad, right.shape)


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
def test_values_are_those_of_real_modules_in_each_precision(precision: str) -> None:
    """They are drawn in the dtype in which the module was made, and converted then."""
    states, numbers = [], []
    for device in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(device):
            module = mixture()
        if device == "meta":
            torch.manual_seed(3)
        engine = Engine(accelerator="cpu", precision=precision)
        engine.prepare_module(module, Optimization())
        states.append(module.state_dict())
        numbers.append(torch.rand(1))
    assert torch.equal(*numbers)
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
        assert value.dtype == states[1][name].dtype, name


def test_a_module_that_a_precision_converts_keeps_what_has_no_values() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].bias = nn.Parameter(torch.ones(2))
    resolve_precision("bf16-true", "cpu").convert_module(module)
    kept = {str(each.dtype) for each in module.parameters() if each.is_meta}
    assert (kept, module[0].bias.dtype) == ({"torch.float32"}, torch.bfloat16)


def test_tied_tensors_stay_tied() -> None:
    with torch.device("meta"):
        net = tied()
    materialize(net)
    assert net[0].weight is net[2].weight


def test_parts_are_made_one_after_another() -> None:
    """Parts draw the same values as the whole, and do not change the other parts."""
    torch.manual_seed(3)
    real = transformer()
    with torch.device("meta"):
        module = transformer()
    torch.manual_seed(3)
    order = list(innermost_first(module))
    assert order[-1] is module
    half = order.index(module[1]) + 1
    materialize(module, order[:half])
    assert torch.equal(module[1].linear1.weight, real[1].linear1.weight)
    assert all(parameter.is_meta for parameter in (*module[2].parameters(), *module[3].parameters()))
    materialize(module, order[half:])
    assert torch.equal(module[3].weight, real[3].weight)


def test_real_tensors_keep_their_values() -> None:
    with torch.device("meta"):
        line = nn.Linear(3, 2)
    weight = torch.ones(2, 3)
    line.weight = nn.Parameter(weight)
    materialize(line)
    assert torch.equal(line.weight, weight)
    assert not line.bias.is_meta
    real = nn.Linear(3, 2)
    before = real.weight
    materialize(real)
    assert real.weight is before


def custom() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3))
    nn.init.ones_(net[0].weight)
    return net


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))


@pytest.mark.parametrize(("make", "text"), [
    (custom, r"'0.weight' of Sequential was made on the meta device.*in other ways than by reset_parameters"),
    (Bare, r"'weight' of Bare .*no reset_parameters sets it. Give its module a reset_parameters\(\)"),
    (Buffered, r"'table' of Buffered .*no reset_parameters sets it"),
])  # fmt: skip
def test_values_that_are_lost_are_refused(make: Callable[[], nn.Module], text: str) -> None:
    with torch.device("meta"):
        module = make()
    with pytest.raises(ValueError, match=text):
        materialize(module)


def test_a_module_without_tensors_is_unchanged() -> None:
    net = nn.Tanh()
    materialize(net)
    x: Tensor = torch.ones(1)
    assert torch.equal(net(x), x.tanh())
