"""Ranks whose models differ are named in an error on every rank, before any weights are sent."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import deadline
from jobs import run_job
from small import ACCELERATOR, ON_HOST, QUIET, Classifier, make_loader, make_net
from torch import nn

import trainwright as tw


class Other(Classifier):
    """Differs on rank 1 in one respect."""

    def __init__(self, respect: str) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)
        differs = dist.is_initialized() and dist.get_rank() == 1
        if respect == "shape" and differs:
            self.extra = nn.Linear(3, 4)
        elif respect == "name" and differs:
            self.more = self.extra
            del self.extra
        elif respect == "dtype" and differs:
            self.extra.double()
        elif respect == "frozen" and differs:
            self.extra.bias.requires_grad_(False)
        elif respect == "buffer" and differs:
            self.register_buffer("mask", torch.ones(2))
        elif respect == "length" and differs:
            self.one_more = nn.Linear(1, 1)


class FreezesAlone(Classifier):
    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch == 1 and dist.get_rank() == 1:
            self.net[0].requires_grad_(False)


def other_arguments(rank: int) -> dict[str, str]:
    """Return the errors of fits with other arguments on rank 1. The first fit differs only in allowed arguments."""
    allowed = {**QUIET, "enable_progress_bar": rank == 0, "detect_anomaly": rank == 1}
    tw.Trainer(max_steps=2, **allowed).fit(Classifier(), make_loader())
    told: dict[str, str] = {}
    for name, settings in {
        "max_steps": {"max_steps": 2 + rank},
        "window": {"accumulate_grad_batches": 1 + rank, "limit_val_batches": None if rank else 3},
        "saving": {"callbacks": [] if rank else [tw.ModelCheckpoint()], "enable_checkpointing": rank == 0},
    }.items():
        trainer = tw.Trainer(max_epochs=1, **{**QUIET, "enable_checkpointing": None, **settings})
        with pytest.raises(ValueError) as caught:
            trainer.fit(Classifier(), make_loader())
        told[name] = str(caught.value)
    return told


TOLD = {
    "shape": "rank 0 has 'extra.weight', a parameter of shape (3, 3) and torch.float32 where rank 1 has 'extra.weight', "
    "a parameter of shape (4, 3) and torch.float32",
    "name": "rank 0 has 'extra.weight', .* rank 1 has 'more.weight', ",
    "dtype": "where rank 1 has 'extra.weight', a parameter of shape (3, 3) and torch.float64",
    "frozen": "where rank 1 has 'extra.bias', a parameter of shape (3,) and torch.float32, frozen",
    "buffer": "rank 0 has nothing more where rank 1 has 'mask', a buffer of shape (2,)",
    "length": "rank 0 has nothing more where rank 1 has 'one_more.weight', a parameter of shape (1, 1)",
}


def job(folder: Path) -> dict[str, Any]:
    tw.Engine(accelerator=ACCELERATOR)  # opens the group, so that the models know their rank
    began, told = time.monotonic(), {}
    for respect in TOLD:
        module = Other(respect)
        with pytest.raises(ValueError) as caught:
            tw.Trainer(max_epochs=1, **QUIET).fit(module, make_loader())
        with pytest.raises(ValueError) as again:
            tw.Trainer(**QUIET).test(module, make_loader())
        assert str(again.value) == str(caught.value)
        told[respect] = str(caught.value)
    net = make_net() if dist.get_rank() == 0 else make_net()[:1]
    with pytest.raises(ValueError) as caught:
        tw.Accelerator(cpu=ON_HOST).prepare(net)
    told["accelerator"] = str(caught.value)
    trainer = tw.Trainer(max_epochs=2, **QUIET)
    with pytest.raises(ValueError) as caught:
        trainer.fit(FreezesAlone(), make_loader())
    told["frozen later"] = f"{trainer.global_step} {caught.value}"
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, betas=(0.9, 0.99 + 0.001 * dist.get_rank()))
    with pytest.raises(ValueError) as caught:
        tw.Accelerator(cpu=ON_HOST).prepare(net, optimizer)
    told["options"] = str(caught.value)
    with pytest.raises(ValueError) as caught:
        tw.Accelerator(cpu=ON_HOST, gradient_accumulation_steps=2 + dist.get_rank())
    told["steps of a window"] = str(caught.value)
    with pytest.raises(ValueError) as caught:
        tw.Trainer(max_epochs=1, **QUIET).fit(Classifier(lr=0.1 + dist.get_rank()), make_loader())
    told["rates"] = str(caught.value)
    told |= other_arguments(dist.get_rank())
    took = time.monotonic() - began
    trainer = tw.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Classifier(), make_loader())  # the job goes on
    return {"told": told, "seconds": took, "steps": trainer.global_step}


def test_different_models_are_named_and_hang_nobody(tmp_path: Path) -> None:
    zero, one = run_job(job, 2, tmp_path)
    assert zero["told"] == one["told"]
    assert "by rank betas of group 0 of optimizer 0 is (0.9, 0.99), (0.9, 0.991). Choose" in zero["told"]["options"]
    assert "lr of group 0 of optimizer 0 is 0.1, 1.1" in zero["told"]["rates"]
    for name, setting in {
        "max_steps": "the Trainer's arguments differ between ranks, .* by rank max_steps is 2, 3",
        "steps of a window": "the Accelerator's arguments differ between ranks, .* by rank gradient_accumulation_steps is 2, 3",
        "window": "limit_val_batches is 3, None; accumulate_grad_batches is 1, 2",
        "saving": r"callbacks that save is \['ModelCheckpoint'\], \[\]",
    }.items():
        assert re.search(setting, zero["told"][name])
    for respect, text in TOLD.items():
        said = zero["told"][respect]
        assert said.startswith("rank 1 built a different Other than rank 0: ")
        for part in text.split(".*"):
            assert part in said
    assert zero["told"]["frozen later"].startswith("6 rank 1 built a different FreezesAlone than rank 0: ")
    assert (
        "rank 1 has 'net.0.weight', a parameter of shape (13, 8) and torch.float32, frozen"
        in zero["told"]["frozen later"]
    )
    assert "Build the same model on every rank" in zero["told"]["accelerator"]
    assert zero["seconds"] < deadline(60.0)
    assert zero["steps"] == one["steps"] == 6
