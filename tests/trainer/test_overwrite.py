"""save_checkpoint replaces an earlier checkpoint: a script that ends with a save can be run again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from small import ON_HOST, QUIET, Classifier, assert_equal, make_loader, weights

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint


def train(folder: Path, epochs: int, ckpt_path: Path | None = None, **saving: Any) -> dict[str, torch.Tensor]:
    """Run a script that ends with a save and a test."""
    torch.manual_seed(4)
    module = Classifier(dropout=0.3)
    trainer = tw.Trainer(max_epochs=epochs, **QUIET)
    trainer.fit(module, make_loader(shuffle=True), ckpt_path=ckpt_path)
    assert trainer.save_checkpoint(folder / "final.ckpt", **saving)
    trainer.test(module, make_loader(8), verbose=False)
    return weights(module)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_script_is_run_again_and_goes_on_from_what_it_replaces(blocking: bool, tmp_path: Path) -> None:
    path = tmp_path / "final.ckpt"
    whole = train(tmp_path / "whole", 3)
    train(tmp_path, 1)
    with pytest.raises(tw.CheckpointError, match=r"final\.ckpt exists already, and overwrite=False was given; leave"):
        train(tmp_path, 1, overwrite=False)
    for epochs in (1, 2, 3):
        reached = train(tmp_path, epochs, path, blocking=blocking)
        assert open_checkpoint(str(path)).epoch == epochs
        assert sorted(os.listdir(tmp_path)) == ["final.ckpt", "whole"]
    assert_equal(reached, whole)


def test_a_save_that_waits_for_its_windows_end_overwrites_too(tmp_path: Path) -> None:
    path = tmp_path / "newest.ckpt"

    class Saves(tw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            at_end = batch_idx % 4 == 3
            assert trainer.save_checkpoint(path) is at_end

    trainer = tw.Trainer(max_epochs=1, limit_train_batches=8, accumulate_grad_batches=4, callbacks=Saves(), **QUIET)
    trainer.fit(Classifier(), make_loader())
    assert open_checkpoint(str(path)).step == 2
    assert os.listdir(tmp_path) == ["newest.ckpt"]


def test_save_state_replaces_an_earlier_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    accelerator = tw.Accelerator(cpu=ON_HOST)
    net: Any = torch.nn.Linear(2, 2)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    for step in range(4):
        accelerator.save_state(path, blocking=step % 2 == 0)
        accelerator.finish_save()
        assert open_checkpoint(path).step == step
        accelerator.backward(net(torch.ones(1, 2, device=accelerator.device)).sum())
        optimizer.step()
    with pytest.raises(tw.CheckpointError, match="exists already, and overwrite=False was given"):
        accelerator.save_state(path, overwrite=False)
    assert os.listdir(tmp_path) == ["state"]
