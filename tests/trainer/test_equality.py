"""The same model trained by hand, by the Trainer and by the Accelerator ends in bitwise equal weights.

The optimizer is fused, as the Trainer makes it of itself.
"""

from __future__ import annotations

from typing import Any

import by_hand
import pytest
import torch
from small import DEVICE, ON_HOST, QUIET, Classifier, assert_equal, loss_of, make_loader, make_net, weights

import trainwright as tw

EPOCHS = 3
CASES = {
    "plain": {},
    "accumulation": {"accumulate": 4},  # 11 batches: windows of 4, 4 and 3
    "clip_norm": {"clip_norm": 0.1},
    "clip_value": {"clip_value": 0.01},
    "scheduler": {"scheduler": True},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed": {"precision": "16-mixed", "clip_norm": 0.5},
    "everything": {"precision": "16-mixed", "clip_norm": 0.1, "accumulate": 4, "scheduler": True},
}


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    defaults = {"accumulate": 1, "clip_norm": None, "clip_value": None, "scheduler": False, "precision": "32-true"}
    return {**defaults, **case}


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)


def train_by_hand(case: dict[str, Any], *, loss_in_autocast: bool) -> dict[str, torch.Tensor]:
    net = make_net()
    options = {name: case[name] for name in ("accumulate", "clip_norm", "clip_value", "precision")}
    options |= {"epochs": EPOCHS, "loss_in_autocast": loss_in_autocast}
    make = make_scheduler if case["scheduler"] else None
    by_hand.train_by_hand(net, list(make_loader()), DEVICE, make_scheduler=make, **options)
    return weights(net)


class Scheduled(Classifier):
    def __init__(self, with_scheduler: bool) -> None:
        super().__init__()
        self.with_scheduler = with_scheduler

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if not self.with_scheduler:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make_scheduler(optimizer), "interval": "step"}}


def train_by_trainer(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    module = Scheduled(case["scheduler"])
    trainer = tw.Trainer(
        max_epochs=EPOCHS,
        precision=case["precision"],
        accumulate_grad_batches=case["accumulate"],
        gradient_clip_val=case["clip_norm"] or case["clip_value"],
        gradient_clip_algorithm="value" if case["clip_value"] else "norm",
        **QUIET,
    )
    trainer.fit(module, make_loader())
    return weights(module.net)


def train_by_accelerator(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    accelerator = tw.Accelerator(
        cpu=ON_HOST, precision=case["precision"], gradient_accumulation_steps=case["accumulate"]
    )
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, fused=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, make_loader())
    scheduler = accelerator.prepare(make_scheduler(optimizer)) if case["scheduler"] else None
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if case["clip_value"]:
                    accelerator.clip_grad_value_(model.parameters(), case["clip_value"])
                if case["clip_norm"]:
                    accelerator.clip_grad_norm_(model.parameters(), case["clip_norm"])
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
    return weights(net)


@pytest.mark.parametrize("name", CASES)
def test_trainer_and_accelerator_are_bitwise_the_hand_written_loop(name: str) -> None:
    case = settings_of(CASES[name])
    assert_equal(train_by_trainer(case), train_by_hand(case, loss_in_autocast=True))
    assert_equal(train_by_accelerator(case), train_by_hand(case, loss_in_autocast=False))


def test_accelerator_step_returns_the_norm_and_the_skip() -> None:
    case = settings_of(CASES["clip_norm"])
    accelerator = tw.Accelerator(cpu=ON_HOST)
    net = make_net()
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.05, fused=True), make_loader()
    )
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            result = accelerator.step(optimizer, max_norm=0.1)
            assert not result.skipped
    assert_equal(weights(net), train_by_hand(case, loss_in_autocast=False))
    assert accelerator.step_count == EPOCHS * len(loader)
