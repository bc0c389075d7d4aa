"""grad_norm returns the norms of gradients, to log them."""

from __future__ import annotations

import math

import pytest
import torch
from small import QUIET, Classifier, make_loader
from torch import nn

import trainwright as tw
from trainwright.gradient_norms import grad_norm


def test_norms_of_gradients_are_exact() -> None:
    net = nn.Linear(2, 1)
    assert grad_norm(net, 2) == {}
    net.weight.grad, net.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([-4.0])
    assert grad_norm(net, 2) == {"grad_2.0_norm/weight": 3.0, "grad_2.0_norm/bias": 4.0, "grad_2.0_norm_total": 5.0}
    assert grad_norm(net, "inf")["grad_inf_norm_total"] == 4.0
    assert grad_norm(net, 1, ".")["grad_1.0_norm.bias"] == 4.0
    for wrong in (0, -1, math.nan):
        with pytest.raises(ValueError, match="Pass a number above 0"):
            grad_norm(net, wrong)


def test_norms_are_logged() -> None:
    class Logs(Classifier):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.log_dict(grad_norm(self, 2))

    trainer = tw.Trainer(**QUIET, max_epochs=1)
    trainer.fit(Logs(), make_loader())
    assert {f"grad_2.0_norm/{name}" for name, _ in Classifier().named_parameters()} < set(trainer.callback_metrics)
