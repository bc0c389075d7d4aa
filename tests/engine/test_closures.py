"""Closures: an optimizer that runs the step's forward and backward itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import ACCELERATOR, ON_HOST, loss_of, make_data, make_net
from torch import Tensor, nn

import trainwright as tw
from trainwright.engine.engine import Engine
from trainwright.engine.prepared import PreparedOptimizer
from trainwright.strategies.base import Optimization


def closure_of(accelerator: Any, model: Any, optimizer: Any) -> Any:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, make_data(8)[:])
        accelerator.backward(loss)
        return loss

    return closure


def test_a_loop_of_ones_own_passes_a_closure() -> None:
    plain = make_net()
    lbfgs = torch.optim.LBFGS(plain.parameters(), lr=0.3, max_iter=4)

    def plain_closure() -> Tensor:
        lbfgs.zero_grad()
        loss = loss_of(plain, make_data(8)[:])
        loss.backward()
        return loss

    accelerator = tw.Accelerator(cpu=ON_HOST)
    net = make_net()
    model, optimizer = accelerator.prepare(net, torch.optim.LBFGS(net.parameters(), lr=0.3, max_iter=4))
    for _ in range(2):
        expected = lbfgs.step(plain_closure)
        assert optimizer.step(closure_of(accelerator, model, optimizer)).item() == expected.item()
    assert accelerator.step_count == 2
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"gradient_accumulation_steps": 2}, "2 batches a step"), ({"mixed_precision": "fp16"}, "'16-mixed'")],
)
def test_a_closure_that_cannot_hold_is_refused(settings: dict[str, Any], reason: str) -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST, **settings)
    net = make_net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=f"a closure, which cannot be used with .*here .*{reason}"):
        optimizer.step(closure_of(accelerator, model, optimizer))


def test_only_toggled_parameters_get_gradients() -> None:
    engine = Engine(accelerator=ACCELERATOR)
    left, right = make_net(), make_net()
    module = nn.ModuleList([left, right])
    right[0].bias.requires_grad_(False)
    engine.prepare_module(module, Optimization(automatic=False))
    optimizers = engine.prepare_optimizers([torch.optim.SGD(each.parameters(), lr=0.1) for each in module])
    first, _ = (PreparedOptimizer(engine, each) for each in optimizers)
    loss = lambda: (left(torch.ones(1, 8)) * right(torch.ones(1, 8))).sum()  # noqa: E731
    with first.toggle_model(sync_grad=False):
        engine.backward(loss(), retain_graph=True)
    assert all(parameter.grad is not None for parameter in left.parameters())
    assert all(parameter.grad is None for parameter in right.parameters())
    assert [parameter.requires_grad for parameter in right.parameters()] == [True, False, True, True]
    engine.close()
