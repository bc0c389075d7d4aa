"""Closures: an optimizer that runs the step's forward and backward itself, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import ACCELERATOR, ON_HOST, loss_of, make_data, make_net, weights
from torch import Tensor, nn

import trainwright as tw
from trainwright.engine.engine import Engine
from trainwright.engine.prepared import PreparedOptimizer
from trainwright.strategies.base import Optimization

STEPS = 3


def train_lbfgs(strategy: str) -> dict[str, Any]:
    """Full batches of 16 samples, half of them on every rank, with a line search that reads the loss."""
    engine = Engine(strategy=strategy, accelerator=ACCELERATOR)
    net = make_net()
    engine.prepare_module(net, Optimization())
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    (prepared,) = engine.prepare_optimizers([optimizer])
    inputs, targets = make_data(16)[:]
    share = slice(engine.rank * 16 // engine.world_size, (engine.rank + 1) * 16 // engine.world_size)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        prepared.zero_grad()
        loss = nn.functional.cross_entropy(engine.run(net, "forward", inputs[share]), targets[share])
        engine.backward(loss)
        return engine.reduce(loss.detach(), "mean")  # ranks that saw different losses would search different lines

    losses = []
    for _ in range(STEPS):
        result = engine.step(prepared, None, closure)
        assert not result.skipped
        losses.append(engine.reduce(loss_of(net, (inputs, targets)).detach()).item())
    state = weights(net)
    engine.close()
    return {"weights": state, "losses": losses, "calls": calls}


def job(folder: Path) -> dict[str, Any]:
    return train_lbfgs("ddp")


def test_lbfgs_on_two_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    one = train_lbfgs("single_device")
    ranks = run_job(job, 2, tmp_path)
    assert one["calls"] > 2 * STEPS
    assert one["losses"][-1] < 0.5 * one["losses"][0]
    for rank in ranks:
        assert rank["calls"] == one["calls"]
        torch.testing.assert_close(rank["losses"], one["losses"], rtol=1e-4, atol=1e-5)
        for name, value in rank["weights"].items():
            assert torch.equal(value, ranks[0]["weights"][name])
            torch.testing.assert_close(value, one["weights"][name], rtol=1e-3, atol=1e-4)


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
    [
        ({"gradient_accumulation_steps": 2}, "2 batches a step"),
        ({"mixed_precision": "fp16"}, "'16-mixed'"),
    ],
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
