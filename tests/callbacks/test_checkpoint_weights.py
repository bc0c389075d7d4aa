"""Weights that are not finite never replace a checkpoint, and tensors that may be infinite by design are saved."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small import ON_HOST, QUIET, Classifier, make_loader
from torch import nn

import trainwright as tw

SAVING: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "limit_train_batches": 2}


class Changes(tw.Callback):
    """Writes a value into a tensor of the module at given steps. None takes all values of a new module."""

    def __init__(self, name: str, values: dict[int, float | None]) -> None:
        self.name, self.values = name, values

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in self.values:
            value = self.values[trainer.global_step]
            if value is None:
                module.load_state_dict(type(module)().state_dict())
            else:
                module.state_dict(keep_vars=True)[self.name].data.view(-1)[0] = value


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(13, momentum=0.0))
        self.register_buffer("mask", torch.full((2, 2), -torch.inf))
        self.fixed = nn.Parameter(torch.tensor([torch.inf, 1.0]), requires_grad=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ckpt"))


@pytest.mark.parametrize("name", ["net.0.weight", "net.1.running_var"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("async_save", [False, True])
def test_the_good_one_stays_until_the_weights_are_finite_again(
    tmp_path: Path, name: str, value: float, async_save: bool
) -> None:
    checkpoints = tw.ModelCheckpoint(tmp_path, async_save=async_save)
    changes = Changes(name, {3: value, 7: None})
    trainer = tw.Trainer(callbacks=[changes, checkpoints], max_epochs=3, **SAVING)
    with pytest.warns(
        UserWarning,
        match=rf"at step 4: the weights are not finite .*in '{name}.*epoch=0-step=2.ckpt stays|the run has ended",
    ) as caught:
        trainer.fit(Normed(), make_loader(8))
    assert "the run has ended, and the weights are not finite" in str(caught[1].message)
    assert len(caught) == 2
    assert names_in(tmp_path) == ["epoch=0-step=2.ckpt"]
    assert checkpoints.last_model_path == checkpoints.best_model_path == str(tmp_path / "epoch=0-step=2.ckpt")
    trainer = tw.Trainer(callbacks=[changes, tw.ModelCheckpoint(tmp_path)], max_epochs=4, **SAVING)
    with pytest.warns(UserWarning, match="not finite"):
        trainer.fit(Normed(), make_loader(8), ckpt_path="last")  # from step 2
    assert names_in(tmp_path) == ["epoch=0-step=2.ckpt", "epoch=3-step=8.ckpt"]  # the source stays until the next run


def test_what_holds_such_values_by_design_is_saved(tmp_path: Path) -> None:
    module = Normed()
    trainer = tw.Trainer(callbacks=[tw.ModelCheckpoint(tmp_path)], max_epochs=2, **SAVING)
    trainer.fit(module, make_loader(8))
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    assert names_in(tmp_path) == ["epoch=1-step=4.ckpt", "own.ckpt"]
    assert torch.equal(Normed.load_from_checkpoint(tmp_path / "own.ckpt").mask, module.mask)


def test_a_path_of_ones_own_is_written_and_a_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    trainer = tw.Trainer(callbacks=[Changes("net.0.bias", {2: torch.nan})], max_epochs=1, **{**SAVING, **QUIET})
    trainer.fit(Classifier(), make_loader(4))
    trainer.save_checkpoint(tmp_path / "good.ckpt")
    with pytest.warns(UserWarning, match="the run has ended, and the weights are not finite"):
        trainer.fit(Classifier(), make_loader(8))
    with pytest.raises(
        tw.CheckpointError, match=r"not written: the weights are not finite .*'net.0.bias'\), and the one that"
    ):
        trainer.save_checkpoint(tmp_path / "good.ckpt", overwrite=True)
    with pytest.warns(UserWarning, match="is written with them"):
        trainer.save_checkpoint(tmp_path / "new.ckpt", overwrite=True)
    assert bool(Classifier.load_from_checkpoint(tmp_path / "good.ckpt").net[0].bias.isfinite().all())

    accelerator = tw.Accelerator(cpu=ON_HOST)
    net = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "loop.ckpt")
    with torch.no_grad():
        net.weight[0, 0] = torch.inf
    with pytest.raises(tw.CheckpointError, match="the weights are not finite"):
        accelerator.save_state(tmp_path / "loop.ckpt", overwrite=True)


def test_neither_a_stop_nor_an_exception_saves_them(tmp_path: Path, capsys: Any) -> None:
    class Ends(tw.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3 and ending == "signal":
                os.kill(os.getpid(), signal.SIGTERM)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            if trainer.global_step == 3 and ending == "exception":
                raise OSError("the end")

    for ending in ("signal", "exception"):
        checkpoints = tw.ModelCheckpoint(tmp_path / ending, every_n_epochs=1, save_on_exception=True)
        settings = {**SAVING, "limit_train_batches": 4, "val_check_interval": 3, "num_sanity_val_steps": 0}
        trainer = tw.Trainer(
            callbacks=[Changes("net.0.bias", {3: torch.nan}), Ends(), checkpoints], max_epochs=1, **settings
        )
        with warnings.catch_warnings(action="ignore"), pytest.raises((tw.RunStopped, OSError)):
            trainer.fit(Classifier(), make_loader(16), make_loader(4))
        assert names_in(tmp_path / ending) == []
        assert "not finite" in capsys.readouterr().err
