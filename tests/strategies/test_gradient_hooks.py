"""Gradient hooks of parameters under sharding, and a backward through gradients."""

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

WORLD = 2
STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "fsdp, groups": lambda: tw.FSDPStrategy(auto_wrap_policy={nn.Linear}),
    "deepspeed_stage_3": lambda: "deepspeed_stage_3",
}


class Hooked(Classifier):
    """Scales gradients by hooks of its parameters, made and removed before and after sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.first = self.net[0].weight.register_hook(lambda gradient: 0.1 * gradient)
        self.net[3].bias.register_post_accumulate_grad_hook(self.count)

    def count(self, parameter: Tensor) -> None:
        self.calls += 1

    def on_train_start(self) -> None:
        self.net[3].weight.register_hook(lambda gradient: 0.5 * gradient)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.first.remove()
            self.net[0].weight.register_hook(lambda gradient: 0.3 * gradient)


class Penalty(Classifier):
    """A penalty on the gradient of the inputs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        outputs = self.net(inputs)
        (gradient,) = torch.autograd.grad(outputs.logsumexp(1).sum(), inputs, create_graph=True)
        return nn.functional.cross_entropy(outputs, batch[1]) + gradient.square().sum(1).mean()


class Nudged(Classifier):
    """Sends a backward to its inputs in between, without a graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(self.net, (inputs, batch[1])), inputs)
        return loss_of(self.net, (batch[0] + 0.1 * gradient.sign(), batch[1]))


def trained(module: Classifier, strategy: Any, world: int) -> dict[str, Tensor]:
    loader = make_loader(32, 8 // world)
    tw.Trainer(strategy=strategy, devices=world, max_epochs=2, **QUIET).fit(module, loader)
    return dict(tw.gather_module(module, all_ranks=True).state_dict())  # type: ignore[union-attr]


def runs(folder: Path) -> dict[str, Any]:
    quiet()
    found: dict[str, Any] = {}
    for name, make in STRATEGIES.items():
        module = Hooked()
        found[f"hooked, {name}"] = trained(module, make(), WORLD)
        found[f"calls, {name}"] = module.calls
        found[f"nudged, {name}"] = trained(Nudged(), make(), WORLD)
    for name in ("ddp", "fsdp"):
        found[f"penalty, {name}"] = trained(Penalty(), name, WORLD)
    for name in ("fsdp, groups", "deepspeed_stage_3"):
        with pytest.raises(RuntimeError) as refusal:
            trained(Penalty(), STRATEGIES[name](), WORLD)
        found[f"refusal, {name}"] = "\n".join([str(refusal.value), *getattr(refusal.value, "__notes__", [])])
    return found


@pytest.mark.slow
def test_gradient_hooks_are_called_as_on_one_process(tmp_path: Path) -> None:
    kinds = {"hooked": Hooked, "nudged": Nudged, "penalty": Penalty}
    expected = {name: trained(kind(), "auto", 1) for name, kind in kinds.items()}
    for rank in run_job(runs, WORLD, tmp_path):
        for case, weights in rank.items():
            kind, _, strategy = case.partition(", ")
            if kind in kinds:
                for name, value in expected[kind].items():
                    torch.testing.assert_close(weights[name], value, msg=f"{case}: {name}")
            elif kind == "calls":
                assert weights == 8, strategy
        assert rank["refusal, fsdp, groups"].startswith(
            "a backward with create_graph=True went through 'net.3', which fsdp"
        )
        assert "Under ZeRO stage 3 a rank holds only a part of a parameter" in rank["refusal, deepspeed_stage_3"]
