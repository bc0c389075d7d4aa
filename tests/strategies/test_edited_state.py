"""What on_save_checkpoint makes of a state_dict is stored whole under every strategy, or refused by name on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import quiet
from jobs import run_job
from small import QUIET, Classifier, make_loader
from torch import Tensor

import trainwright as tw
from trainwright.checkpoint.store import open_checkpoint

FAST = ("ddp", "fsdp")
SLOW = ("ddp_sharded", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
Edit = Callable[[dict[str, Any]], None]


def cast(contents: dict[str, Any]) -> None:
    """Store low precision, a layer under another name, and something added, element by element."""
    state = contents["state_dict"]
    for name in list(state):
        state[f"half.{name}"] = state[name].clone().mul_(0.5) + 1.0
        state[name] = state[name].to(torch.bfloat16)
    state["renamed"] = state.pop("net.0.weight")
    state["more"] = torch.arange(3.0)


def norms(contents: dict[str, Any]) -> None:
    state = contents["state_dict"]
    state["norm"] = state["net.0.weight"].norm()


def average(contents: dict[str, Any]) -> None:
    contents["average"] = {name: value * 0.5 for name, value in contents["state_dict"].items()}


class Edits(tw.Callback):
    def __init__(self) -> None:
        self.edit: Edit | None = None

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.edit is not None:
            self.edit(checkpoint)


def tensors_of(path: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(str(path))
    return {name: checkpoint.read_tensor("model", name) for name in checkpoint.tensors("model")}


def edited(folder: Path, strategies: tuple[str, ...] = FAST) -> dict[str, Any]:
    quiet()
    said = {}
    for strategy in strategies:
        edits = Edits()
        trainer = tw.Trainer(devices=2, strategy=strategy, max_epochs=1, callbacks=[edits], **QUIET)
        trainer.fit(Classifier(), make_loader(16))
        place = folder / strategy
        trainer.save_checkpoint(place / "plain.ckpt")
        edits.edit = cast
        trainer.save_checkpoint(place / "cast.ckpt")
        trainer.save_checkpoint(place / "async.ckpt", blocking=False)
        trainer.engine.finish_save()
        refusals = []
        for edit in (norms, average):
            edits.edit = edit
            try:
                trainer.save_checkpoint(place / f"{edit.__name__}.ckpt")
                refusals.append("")
            except tw.CheckpointError as error:
                refusals.append(str(error))
        said[strategy] = [*(tensors_of(place / f"{name}.ckpt") for name in ("plain", "cast", "async")), refusals]
    return said


def the_slow_ones(folder: Path) -> dict[str, Any]:
    return edited(folder, SLOW)


@pytest.mark.parametrize("job", [edited, pytest.param(the_slow_ones, marks=pytest.mark.slow)])
def test_an_edited_state_dict_is_stored_whole_or_refused(tmp_path: Path, job: Any) -> None:
    ranks = run_job(job, 2, tmp_path)
    for strategy, (plain, *casts, refusals) in ranks[0].items():
        for found in casts:
            wanted = {"more": torch.arange(3.0)}
            for name, value in plain.items():
                wanted[f"half.{name}"] = value * 0.5 + 1.0
                wanted["renamed" if name == "net.0.weight" else name] = value.to(torch.bfloat16)
            assert found.keys() == wanted.keys(), strategy
            assert all(torch.equal(found[name], wanted[name]) for name in wanted), strategy
        assert ranks[1][strategy][3] == refusals
        if strategy.startswith("ddp"):
            assert refusals == ["", ""]
        else:
            assert "left as 'norm' in the state_dict what was computed of this rank's part" in refusals[0]
            assert "part of 'net.0.weight', which other ranks hold the rest of" in refusals[1]
