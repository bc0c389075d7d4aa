"""A save rejects shards in an edited state_dict and weights that are not finite, on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import quiet
from jobs import run_job
from small import QUIET, Classifier, make_loader
from torch import Tensor
from torch.distributed.tensor import DTensor

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint

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


def edited(folder: Path, strategies: tuple[str, ...]) -> dict[str, Any]:
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


class Poison(tw.Callback):
    """Puts a NaN into rank 1's part of the weights in the second epoch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch != 1:
            return
        weight = module.get_parameter("net.3.weight")
        if trainer.strategy.name == "deepspeed_stage_3":
            import deepspeed

            with deepspeed.zero.GatheredParameters([weight], modifier_rank=1):
                weight.data.view(-1)[-1] = torch.nan
            return
        for piece in trainer.engine.strategy.model_pieces(module):
            if trainer.global_rank == 1 and piece.name == "net.3.weight":
                piece.tensor.view(-1)[-1:] = torch.nan
                if not isinstance(weight, DTensor):  # beside its master
                    weight.data.view(-1)[piece.start + piece.tensor.numel() - 1] = torch.nan


def poisoned(folder: Path, strategies: tuple[str, ...]) -> dict[str, Any]:
    said = {}
    for strategy in strategies:
        best = tw.ModelCheckpoint(folder / strategy / "kept")
        last = tw.ModelCheckpoint(folder / strategy / "last", every_n_train_steps=1, save_top_k=0, save_last=True)
        settings = {**QUIET, "enable_checkpointing": True, "max_epochs": 3, "limit_train_batches": 2}
        trainer = tw.Trainer(devices=2, strategy=strategy, callbacks=[Poison(), best, last], **settings)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Classifier(), make_loader(16))
            trainer.save_checkpoint(folder / strategy / "own.ckpt")
        refused = ""
        try:
            trainer.save_checkpoint(best.best_model_path, overwrite=True)
        except tw.CheckpointError as error:
            refused = str(error)
        found = [path for each in (best, last) for path in sorted(Path(str(each.dirpath)).glob("*.ckpt"))]
        names = [path.name for path in found if not path.is_symlink()]
        newest = [Path(best.best_model_path).name, Path(last.last_model_path).name]
        said[strategy] = [names, newest, [str(each.message) for each in caught], refused]
    return said


class Noting(Classifier):
    """Keeps a number in its state_dict, and has a hook after loading."""

    def __init__(self, is_computed: bool = False) -> None:
        super().__init__()
        self.note, self.loads, self.is_computed = 0, 0, is_computed
        self.register_load_state_dict_post_hook(count_load)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}note"] = self.note
        if self.is_computed:
            destination[f"{prefix}double"] = self.net[0].bias * 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.note = state_dict.pop(f"{prefix}note")
        state_dict.pop(f"{prefix}double", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def count_load(module: Any, keys: Any) -> None:
    module.loads += 1


def noted(folder: Path, strategies: tuple[str, ...]) -> dict[str, Any]:
    said = {}
    for strategy in strategies:
        module = Noting()
        trainer = tw.Trainer(devices=2, strategy=strategy, max_epochs=1, **QUIET)
        trainer.fit(module, make_loader(16))
        module.note = 5
        trainer.save_checkpoint(folder / strategy / "noted.ckpt")
        again, refusals = Noting(), []
        settings = {**QUIET, "enable_checkpointing": True, "default_root_dir": folder / strategy}
        for resumed, path in ((again, folder / strategy / "noted.ckpt"), (Noting(True), None)):
            try:
                trainer = tw.Trainer(devices=2, strategy=strategy, max_epochs=2, **settings)
                trainer.fit(resumed, make_loader(16), ckpt_path=path)
            except tw.CheckpointError as error:
                refusals.append(str(error))
        said[strategy] = [again.note, again.loads, refusals]
    return said


def saved(folder: Path, strategies: tuple[str, ...] = FAST) -> list[dict[str, Any]]:
    quiet()
    return [
        edited(folder / "edited", strategies),
        poisoned(folder / "poisoned", strategies),
        noted(folder / "noted", strategies),
    ]


def the_slow_ones(folder: Path) -> list[dict[str, Any]]:
    return saved(folder, SLOW)


@pytest.fixture(scope="module", params=[saved, pytest.param(the_slow_ones, marks=pytest.mark.slow)])
def ranks(request: Any, tmp_path_factory: Any) -> list[Any]:
    return run_job(request.param, 2, tmp_path_factory.mktemp("saved"))


def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(ranks: list[Any]) -> None:
    for strategy, (names, newest, warned, refused) in ranks[0][1].items():
        assert newest == ["epoch=0-step=2.ckpt", "epoch=0-step=2.ckpt"], strategy
        assert names == newest
        assert len(warned) == 4  # of both ModelCheckpoints, of the run's end, and of the save to another path
        assert (
            "saves nothing in epoch 1, at step 3: the weights are not finite (NaN or infinity in 'net.3.weight"
            in warned[0]
        )
        assert "epoch=0-step=2.ckpt stays as the newest one" in warned[0]
        assert "own.ckpt is written with them" in warned[3]
        assert "and the one that is there stays" in refused
        assert ranks[1][1][strategy] == [names, newest, [], refused]


def test_an_edited_state_dict_is_stored_whole_or_refused(ranks: list[Any]) -> None:
    for strategy, (plain, *casts, refusals) in ranks[0][0].items():
        for found in casts:
            wanted = {"more": torch.arange(3.0)}
            for name, value in plain.items():
                wanted[f"half.{name}"] = value * 0.5 + 1.0
                wanted["renamed" if name == "net.0.weight" else name] = value.to(torch.bfloat16)
            assert found.keys() == wanted.keys(), strategy
            assert all(torch.equal(found[name], wanted[name]) for name in wanted), strategy
        assert ranks[1][0][strategy][3] == refusals
        if strategy.startswith("ddp"):
            assert refusals == ["", ""]
        else:
            assert "left 'norm' in the state_dict, computed from this rank's part" in refusals[0]
            assert "this rank's shard of 'net.0.weight'" in refusals[1]


def test_a_modules_own_way_to_load_itself_is_used_or_refused(ranks: list[Any]) -> None:
    for rank in ranks:
        for strategy, (note, loads, refusals) in rank[2].items():
            if strategy.startswith("ddp"):
                assert (note, loads, refusals) == (5, 1, []), strategy
            else:
                assert (note, loads, len(refusals)) == (0, 0, 2), strategy
                assert "of another model (extra state only in it: note)" in refusals[0]
                assert "'double' in the state_dict of Noting is computed from tensors" in refusals[1]
