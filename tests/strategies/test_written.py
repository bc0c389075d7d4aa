"""Writes of a user's code into parameters are kept as on one process, or rejected by name."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import quiet
from jobs import run_job
from small import QUIET, assert_close
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.checkpoint.foreign_formats import read_weights
from trainwright.strategies.fsdp2.strategy import FSDPStrategy
from trainwright.strategies.zero.strategy import DeepSpeedStrategy

WIDTH = 6


class Block(nn.Module):
    """A block, which fsdp gathers separately."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def write(targets: Iterable[Any], sources: Iterable[Any], form: str, rate: float = 0.1) -> None:
    """Move parameters towards others, in one of several usual forms."""
    targets, sources = list(targets), list(sources)
    if form == "gathered":
        import deepspeed

        with deepspeed.zero.GatheredParameters([*targets, *sources], modifier_rank=0):
            write(targets, sources, "in place", rate)
        return
    with torch.no_grad():
        if form == "foreach":
            torch._foreach_lerp_(targets, [each.detach() for each in sources], rate)
            return
        for target, source in zip(targets, sources, strict=True):
            if form == "in place":
                target.lerp_(source, rate)
            elif form == "data in place":
                target.data.mul_(1 - rate).add_(source.data * rate)
            else:
                target.data = target.data * (1 - rate) + source.data * rate


class Teaches(tw.Module):
    """A net and a frozen copy that follows it, written at a chosen place in a chosen form."""

    def __init__(self, place: str, form: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.place, self.form = place, form
        self.online = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def follow(self, place: str) -> None:
        if self.place == place:
            write(self.target.parameters(), self.online.parameters(), self.form)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.follow("step")
        out = self.online(batch[0])
        return (out - batch[0].sin()).square().mean() + (out - self.target(batch[0])).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.follow("hook")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.2, momentum=0.5)


class Clips(Teaches):
    """Clips its trained weights after every step or in every forward."""

    def follow(self, place: str) -> None:
        if self.place == place:
            with torch.no_grad():
                for parameter in self.online.parameters():
                    (parameter if self.form == "in place" else parameter.data).clamp_(-0.25, 0.25)
                    if self.form == "data":
                        parameter.data = parameter.data.clone()


STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp": partial(FSDPStrategy, auto_wrap_policy=[Block]),
    "fsdp, one group": "fsdp",
    "deepspeed_stage_1": "deepspeed_stage_1",
    "deepspeed_stage_2": "deepspeed_stage_2",
    "deepspeed_stage_3": "deepspeed_stage_3",
    "deepspeed_stage_3, parted": partial(DeepSpeedStrategy, stage=3, stage3_param_persistence_threshold=0),
}
KEPT: list[tuple[str, type[Any], str, str]] = [
    ("ddp", Teaches, "step", "data in place"),
    *(("fsdp", Teaches, "hook", form) for form in ("in place", "foreach", "data in place")),
    ("fsdp", Clips, "hook", "data in place"),
    ("deepspeed_stage_1", Clips, "step", "data in place"),
    ("deepspeed_stage_1", Clips, "hook", "in place"),
    ("deepspeed_stage_2", Teaches, "step", "foreach"),
    ("deepspeed_stage_2", Clips, "hook", "data in place"),
    ("deepspeed_stage_3", Teaches, "hook", "gathered"),
    ("deepspeed_stage_3, parted", Teaches, "hook", "gathered"),
]
BY_STAGE_3 = r"the parameter '.*' was written, which ZeRO stage 3 would lose.*GatheredParameters.* choose 'ddp'"
BY_FSDP = r"the step wrote the parameter 'target.*' while fsdp had gathered it.* on_train_batch_end"
REFUSED: list[tuple[str, type[Any], str, str, str]] = [
    ("fsdp, one group", Teaches, "step", "in place", BY_FSDP),
    ("fsdp, one group", Teaches, "step", "data", BY_FSDP),
    ("fsdp", Clips, "step", "in place", r"the step wrote the parameter 'online.1.weight' while"),
    ("deepspeed_stage_2", Clips, "hook", "data", r"a parameter was given other memory .*Write in place instead"),
    ("deepspeed_stage_3", Teaches, "step", "in place", BY_STAGE_3),
    ("deepspeed_stage_3, parted", Clips, "hook", "in place", BY_STAGE_3),
]


def trained(strategy: Any, module: tw.Module, ranks: int, path: Path) -> dict[str, Tensor]:
    """Return the weights in the checkpoint that a run ends with."""
    torch.manual_seed(5)
    data = DataLoader(TensorDataset(torch.randn(24, WIDTH)), batch_size=2 * ranks)
    made = strategy() if callable(strategy) else strategy
    trainer = tw.Trainer(strategy=made, max_epochs=1, **QUIET)
    trainer.fit(module, data)
    trainer.save_checkpoint(path)
    return read_weights(path).state_dict


def written(folder: Path) -> list[dict[str, Tensor]]:
    quiet()
    for name, kind, place, form, text in REFUSED:
        with pytest.raises(RuntimeError, match=text):
            trained(STRATEGIES[name], kind(place, form), 1, folder / "refused.ckpt")
    return [
        trained(STRATEGIES[name], kind(place, form), 1, folder / f"{number}.ckpt")
        for number, (name, kind, place, form) in enumerate(KEPT)
    ]


@pytest.mark.slow
def test_writes_are_kept_as_on_one_process_or_rejected(tmp_path: Path) -> None:
    ranks = run_job(written, 2, tmp_path)
    for number, (name, kind, place, form) in enumerate(KEPT):
        module = kind(place, "in place" if form == "gathered" else form)
        expected = trained("auto", module, 2, tmp_path / "alone.ckpt")
        for rank in ranks:
            assert_close(rank[number], expected), (name, kind, place, form)
