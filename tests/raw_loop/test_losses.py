"""The losses that an Accelerator's backward accepts in every batch, several over one forward too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import ON_HOST
from torch import Tensor, nn

import trainwright as tw

pytestmark = pytest.mark.skipif(not ON_HOST, reason="computes on the CPU")
INPUTS = torch.ones(2, 4)


def made(accelerator: tw.Accelerator) -> tuple[Any, Any]:
    net = nn.Linear(4, 1)
    return accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))  # type: ignore[no-any-return]


def train(accelerator: tw.Accelerator, net: Any, optimizer: Any) -> None:
    accelerator.backward(net(INPUTS).mean())
    optimizer.step()
    optimizer.zero_grad()


def test_losses_of_no_prepared_model_are_rejected() -> None:
    accelerator = tw.Accelerator(cpu=True)
    stranger = nn.Linear(4, 1)
    with pytest.raises(RuntimeError, match=r"backward was called before a model was prepared. Pass the model"):
        accelerator.backward(stranger(INPUTS).mean())
    net, optimizer = made(accelerator)
    for _ in range(2):
        with pytest.raises(ValueError, match="no prepared model made"):
            accelerator.backward(stranger(INPUTS).mean())
    for _ in range(3):
        with pytest.raises(TypeError, match="given a float"):
            accelerator.backward(1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"a loss of shape \(2, 1\). Take its mean"):
            accelerator.backward(net(INPUTS))
        with pytest.raises(ValueError, match="needs no gradients"):
            accelerator.backward(torch.tensor(1.0))
        train(accelerator, net, optimizer)
    assert accelerator.step_count == 3
    net, optimizer = made(accelerator)  # a second model
    train(accelerator, net, optimizer)


def test_losses_may_share_a_forward_and_use_parameters_beside_the_model() -> None:
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


def on_ranks(folder: Path) -> bool:
    accelerator = tw.Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    net, optimizer = made(accelerator)
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


class Scored(nn.Linear):
    def score(self, inputs: Tensor) -> Tensor:
        return self(inputs).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_model_before_prepare_loses_no_precision(precision: str) -> None:
    accelerator = tw.Accelerator(cpu=True, precision=precision)
    net, inputs = Scored(4, 1), INPUTS.to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    refused = rf"does not compute in precision '{precision}'. Prepare does not change your model"
    with pytest.raises(ValueError, match=refused):
        accelerator.backward(net(inputs).mean())
    train(accelerator, model, optimizer)
    # A loss may go through modules in the precision, and needs no parameter of the model.
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


def test_without_a_precision_one_process_trains_the_model_before_prepare() -> None:
    accelerator = tw.Accelerator(cpu=True)
    net = nn.Linear(4, 1)
    _, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(3):
        train(accelerator, net, optimizer)
    assert accelerator.step_count == 3
