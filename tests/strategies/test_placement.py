"""Tied weights stay tied on the device, and an optimizer made before the move trains them there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import ON_HOST, QUIET, assert_close, weights
from torch import Tensor, nn

import trainwright as tw
from trainwright.strategies.placement import move


class Tied(tw.Module):
    """Two layers with a tied weight and a shared buffer, and an optimizer made with the module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.first.register_buffer("scale", torch.full((4,), 0.5))
        self.second.register_buffer("scale", self.first.scale)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, batch: Tensor) -> Tensor:
        return self.second(self.first(batch).tanh() * self.first.scale) * self.second.scale

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer


def by_hand(batches: list[Tensor]) -> dict[str, Tensor]:
    module = Tied()
    for batch in batches:
        module.optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        module.optimizer.step()
    return weights(module)


def is_tied(module: Tied) -> bool:
    return module.first.weight is module.second.weight and module.first.scale is module.second.scale


def test_a_trainer_trains_tied_weights_as_one() -> None:
    batches = list(torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1)))
    module = Tied()
    tw.Trainer(max_epochs=1, **QUIET).fit(module, batches)
    assert is_tied(module)
    assert_close(weights(module), by_hand(batches))


@pytest.mark.parametrize("at_once", [True, False])
def test_an_accelerator_trains_tied_weights_of_an_optimizer_made_before(at_once: bool) -> None:
    batches = list(torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1)))
    accelerator, module = tw.Accelerator(cpu=ON_HOST), Tied()
    if at_once:
        model, optimizer = accelerator.prepare(module, module.optimizer)
    else:
        model = accelerator.prepare(module)
        optimizer = accelerator.prepare(module.optimizer)
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(model(batch.to(accelerator.device)).square().mean())
        optimizer.step()
    assert is_tied(module)
    assert_close(weights(module), by_hand(batches))


def test_what_a_move_makes_anew_is_tied_again() -> None:
    """For the meta device torch makes a tensor per place, as for backends with another memory format."""
    module = Tied()
    module.more = nn.LSTM(2, 2, 2)
    module.more.weight_hh_l1 = module.more.weight_hh_l0
    move(module, torch.device("meta"))
    assert is_tied(module)
    assert module.more.weight_hh_l1 is module.more.weight_hh_l0
    assert module.more._flat_weights[5] is module.more.weight_hh_l0
    assert all(each.is_meta for each in (*module.parameters(), *module.buffers()))
