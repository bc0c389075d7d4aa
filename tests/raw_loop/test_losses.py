"""What an Accelerator's backward accepts, in every batch: losses of prepared models, several over one forward too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from jobs import run_job
from small import ON_HOST
from torch import Tensor, nn

import trainwright as tw
from trainwright.raw_loop import loss_graph

pytestmark = pytest.mark.skipif(not ON_HOST, reason="computes on the CPU")
INPUTS = torch.ones(2, 4)
MOST_CALLS = 15
"""Of Python and of C, which the check of a loss makes, on several ranks too."""


def made(accelerator: tw.Accelerator) -> tuple[Any, Any]:
    net = nn.Linear(4, 1)
    return accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))  # type: ignore[no-any-return]


def train(accelerator: tw.Accelerator, net: Any, optimizer: Any) -> None:
    accelerator.backward(net(INPUTS).mean())
    optimizer.step()
    optimizer.zero_grad()


def calls_of_check(loop: Callable[[], None]) -> int:
    """Return how many calls the check of a loss makes, in the one backward of this loop."""
    checks: list[FrameType] = []
    calls = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        if event == "call" and frame.f_code is loss_graph.LossCheck.check.__code__:
            checks.append(frame)
        if checks and event in ("call", "c_call"):
            calls += 1
        if event == "return" and checks[-1:] == [frame]:
            checks.pop()

    sys.setprofile(profile)
    try:
        loop()
    finally:
        sys.setprofile(None)
    return calls


def test_the_check_of_a_loss_is_a_few_calls() -> None:
    accelerator = tw.Accelerator(cpu=True)
    net = nn.Sequential(*(layer for _ in range(9) for layer in (nn.Linear(4, 4), nn.Tanh())))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    counts = [calls_of_check(lambda: train(accelerator, model, optimizer)) for _ in range(4)]
    assert counts[0] > MOST_CALLS, "the first two look for the parameters"
    assert 0 < max(counts[2:]) <= MOST_CALLS, counts

    def other_loss() -> None:
        accelerator.backward(model(INPUTS).square().mean() + 1.0)

    assert calls_of_check(other_loss) > MOST_CALLS, "the graph has changed"
    assert calls_of_check(other_loss) <= MOST_CALLS


def test_each_loss_is_checked_not_the_first_alone() -> None:
    accelerator = tw.Accelerator(cpu=True)
    stranger = nn.Linear(4, 1)
    with pytest.raises(RuntimeError, match="backward was called before a model was prepared; pass the model"):
        accelerator.backward(stranger(INPUTS).mean())
    net, optimizer = made(accelerator)
    for _ in range(3):
        with pytest.raises(ValueError, match="no prepared model made"):
            accelerator.backward(stranger(INPUTS).mean())
        with pytest.raises(TypeError, match="given a float"):
            accelerator.backward(1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"a loss of shape \(2, 1\)"):
            accelerator.backward(net(INPUTS))
        with pytest.raises(ValueError, match="needs no gradients"):
            accelerator.backward(torch.tensor(1.0))
        train(accelerator, net, optimizer)
    assert accelerator.step_count == 3
    net, optimizer = made(accelerator)  # a second model
    train(accelerator, net, optimizer)


def test_losses_that_share_a_forward_and_parameters_beside_the_model() -> None:
    accelerator = tw.Accelerator(cpu=True)
    net, optimizer = made(accelerator)
    scale = nn.Parameter(torch.ones(1))
    accelerator.prepare(torch.optim.SGD([scale], 0.1))
    outputs = net(INPUTS)
    accelerator.backward(outputs.mean(), retain_graph=True)
    accelerator.backward(outputs.square().mean())
    accelerator.backward(scale.sum())
    optimizer.step()
    assert scale.grad is not None
    alone = tw.Accelerator(cpu=True)
    alone.prepare(torch.optim.SGD([scale], 0.1))
    alone.backward(scale.square().sum())


def test_a_large_graph_is_walked_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[bool | None] = []
    walk = loss_graph._reaches

    def counted(loss: Tensor, own: set[Tensor], most: int | None, way: list[int]) -> bool | None:
        found = walk(loss, own, most, way)
        whole.extend([found] if most is None else [])
        return found

    monkeypatch.setattr(loss_graph, "_reaches", counted)
    accelerator = tw.Accelerator(cpu=True)
    net, optimizer = made(accelerator)

    def far(model: Any) -> Tensor:
        loss: Tensor = model(INPUTS).mean()
        for _ in range(loss_graph.MOST_NODES + 1):
            loss = loss * 1.0
        return loss

    with pytest.raises(ValueError, match="no prepared model made"):
        accelerator.backward(far(nn.Linear(4, 1)))
    for _ in range(16):
        accelerator.backward(far(net))
        optimizer.step()
    assert whole == [False, *[True] * 5]  # the first, second, fourth, eighth and sixteenth
    for _ in range(16):
        train(accelerator, net, optimizer)
    assert len(whole) == 6


def on_ranks(folder: Path) -> bool:
    accelerator = tw.Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    net, optimizer = made(accelerator)
    train(accelerator, net, optimizer)
    train(accelerator, net, optimizer)
    calls = calls_of_check(lambda: train(accelerator, net, optimizer))
    assert 0 < calls <= MOST_CALLS, calls
    for _ in range(2):
        with pytest.raises(ValueError, match="or the model as it was before prepare"):
            accelerator.backward(accelerator.unwrap_model(net)(torch.randn(2, 4)).mean())
        train(accelerator, net, optimizer)
    accelerator.backward((outputs := net(torch.randn(2, 4))).mean(), retain_graph=True)
    accelerator.backward(outputs.square().mean())
    optimizer.step()
    other, others = made(accelerator)
    for _ in range(3):
        losses = [each(torch.randn(2, 4)).mean() for each in (net, other)]
        for loss, each in zip(losses, (optimizer, others), strict=True):  # a step between the losses
            accelerator.backward(loss)
            each.step()
            each.zero_grad()
    weights = [*net.parameters(), *other.parameters()]
    return all(torch.equal(*accelerator.gather(each.detach()[None])) for each in weights)


def test_no_rank_drifts_apart(tmp_path: Path) -> None:
    assert run_job(on_ranks, 2, tmp_path) == [True, True]


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_single_process_checks_its_first_losses_and_then_some(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr(loss_graph, "CHECKED_FIRST", 3)
    accelerator = tw.Accelerator(cpu=True, mixed_precision=precision)
    net, optimizer = made(accelerator)
    for _ in range(4):
        assert calls_of_check(lambda: train(accelerator, net, optimizer)) > 0
    assert [calls_of_check(lambda: train(accelerator, net, optimizer)) for _ in range(loss_graph.UNCHECKED)] == [0] * 10
    assert calls_of_check(lambda: train(accelerator, net, optimizer)) > 0
    stranger = nn.Linear(4, 1)

    def train_with_stranger() -> None:
        for _ in range(loss_graph.UNCHECKED + 1):
            accelerator.backward(stranger(INPUTS).mean())
            train(accelerator, net, optimizer)

    with pytest.raises(ValueError, match="no prepared model made"):
        train_with_stranger()
    # What a backward itself refuses is explained at once, although the next losses are not checked.
    train(accelerator, net, optimizer)
    for wrong, error, words in (
        (1.0, TypeError, "given a float"),
        (net(INPUTS), ValueError, r"a loss of shape \(2, 1\)"),
        (torch.tensor(1.0), ValueError, "needs no gradients"),
    ):
        with pytest.raises(error, match=words):
            accelerator.backward(wrong)


def scaling() -> tw.Accelerator:
    return tw.Accelerator(cpu=True, mixed_precision="fp16")


REFUSED = r"whose optimizer was not prepared; precision '16-mixed' multiplies losses by a scale"


def test_a_loss_is_not_scaled_without_a_prepared_optimizer() -> None:
    accelerator = scaling()
    net = accelerator.prepare(nn.Linear(4, 1))
    with pytest.raises(ValueError, match=REFUSED):
        accelerator.backward(net(INPUTS).mean())
    assert all(each.grad is None for each in net.parameters())
    made(accelerator)
    with pytest.raises(ValueError, match=REFUSED):  # another optimizer does not help
        accelerator.backward(net(INPUTS).mean())
    own = accelerator.prepare(torch.optim.SGD(net.parameters(), 0.1))
    train(accelerator, net, own)
    assert accelerator.step_count == 1
    unscaled = tw.Accelerator(cpu=True, mixed_precision="bf16")
    net = unscaled.prepare(nn.Linear(4, 1))
    unscaled.backward(net(INPUTS).mean())


def scale_on_ranks(folder: Path) -> str:
    accelerator = scaling()
    net = accelerator.prepare(nn.Linear(4, 1))
    with pytest.raises(ValueError, match=REFUSED) as caught:
        accelerator.backward(net(INPUTS).mean())
    return str(caught.value)


def test_a_loss_is_not_scaled_without_a_prepared_optimizer_on_ranks(tmp_path: Path) -> None:
    assert len(set(run_job(scale_on_ranks, 2, tmp_path))) == 1


class Scored(nn.Linear):
    def score(self, inputs: Tensor) -> Tensor:
        return self(inputs).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_model_before_prepare_loses_no_precision(precision: str) -> None:
    accelerator = tw.Accelerator(cpu=True, precision=precision)
    net, inputs = Scored(4, 1), INPUTS.to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    refused = rf"does not compute in precision '{precision}'; prepare does not change your model"
    for _ in range(2):
        with pytest.raises(ValueError, match=refused):
            accelerator.backward(net(inputs).mean())
        train(accelerator, model, optimizer)
    # What computes in the precision may be trained through, and what has no parameter of the model needs none.
    with accelerator.autocast():
        loss = net(inputs).mean()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.backward(model.score(inputs))
    optimizer.step()
    scale = nn.Parameter(torch.ones(1))
    accelerator.prepare(torch.optim.SGD([scale], 0.1))
    for _ in range(3):
        accelerator.backward(scale.sum())
        optimizer.step()
    with pytest.raises(ValueError, match=refused):
        accelerator.backward(net(inputs).mean())


def test_without_a_precision_one_process_trains_the_model_before_prepare() -> None:
    accelerator = tw.Accelerator(cpu=True)
    net = nn.Linear(4, 1)
    _, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(3):
        train(accelerator, net, optimizer)
    assert accelerator.step_count == 3
