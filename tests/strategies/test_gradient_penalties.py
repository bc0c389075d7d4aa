"""Backwards through gradients and for the inputs only, as penalties and adversarial examples need, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import quiet
from jobs import run_job
from small import QUIET, Classifier, loss_of, make_loader
from torch import Tensor, nn

import trainwright as tw


class Penalty(Classifier):
    """A penalty on the gradient of the inputs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        outputs = self.net(inputs)
        (gradient,) = torch.autograd.grad(outputs.logsumexp(1).sum(), inputs, create_graph=True)
        return nn.functional.cross_entropy(outputs, batch[1]) + gradient.square().sum(1).mean()


class Nudged(Classifier):
    """Trains on inputs that their gradient has moved."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(self.net, (inputs, batch[1])), inputs)
        return loss_of(self.net, (batch[0] + 0.1 * gradient.sign(), batch[1]))


CASES = {"ddp": (Nudged, Penalty), "fsdp": (Nudged, Penalty), "deepspeed_stage_3": (Nudged,)}

PART = "Under ZeRO stage 3 a rank holds only a part of a parameter"


def trained(module: Classifier, strategy: Any, world: int) -> dict[str, Tensor]:
    tw.Trainer(strategy=strategy, devices=world, max_epochs=2, **QUIET).fit(module, make_loader(32, 8 // world))
    return dict(tw.gather_module(module, all_ranks=True).state_dict())  # type: ignore[union-attr]


def runs(folder: Path) -> dict[Any, dict[str, Tensor]]:
    quiet()
    found = {(kind.__name__, name): trained(kind(), name, 2) for name, kinds in CASES.items() for kind in kinds}
    with pytest.raises(RuntimeError, match=r"a backward with create_graph=True went through 'net.3', which fsdp"):
        trained(Penalty(), tw.FSDPStrategy(auto_wrap_policy={nn.Linear}), 2)
    with pytest.raises(RuntimeError) as refusal:
        trained(Penalty(), "deepspeed_stage_3", 2)
    assert PART in "".join(refusal.value.__notes__)
    return found


@pytest.mark.slow
def test_gradients_of_inputs_are_computed_as_on_one_process(tmp_path: Path) -> None:
    expected = {kind.__name__: trained(kind(), "auto", 1) for kind in (Nudged, Penalty)}
    for rank in run_job(runs, 2, tmp_path):
        for (kind, strategy), weights in rank.items():
            for name, value in expected[kind].items():
                torch.testing.assert_close(weights[name], value, msg=f"{kind}, {strategy}: {name}")
