"""The job of test_strategies.py: a Trainer's checkpoint in an Accelerator and back, and the files of the model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from small import QUIET, Classifier, assert_close, assert_equal, loss_of, make_loader
from torch import Tensor

import trainwright as tw

EPOCHS = 3


class WithForward(Classifier):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs


def both_ways(folder: Path) -> dict[str, Any]:
    """Train an epoch with the Trainer, one with an Accelerator, one with the Trainer. Return the weights."""
    warnings.filterwarnings("ignore")  # of DeepSpeed, which another test looks at
    strategy = folder.name
    whole = fit(strategy, EPOCHS, None, None)
    first = str(folder / "trainer.ckpt")
    fit(strategy, 1, None, first)
    accelerator = tw.Accelerator(cpu=True, strategy=strategy, project_dir=folder / "project")
    module = WithForward()
    model, optimizer, loader = accelerator.prepare(module, module.configure_optimizers(), make_loader(shuffle=True))
    accelerator.load_state(first)
    steps = accelerator.step_count
    assert (steps > 0, loader.epoch) == (True, 1)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    second = accelerator.save_state()
    files = folder / "model"
    accelerator.save_model(model, files, max_shard_size=300)
    state = accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    stored: dict[str, Tensor] = {}
    for file in files.glob("*.safetensors"):
        stored |= load_file(file)
    assert len(list(files.glob("*.safetensors"))) > 1
    if accelerator.is_main_process:
        assert_equal({name: value.cpu() for name, value in state.items()}, stored)
    elif state:
        assert_close({name: value.cpu() for name, value in state.items()}, stored)
    accelerator.engine.close()
    after = fit(strategy, EPOCHS, second, None)
    return {"whole": whole, "both": after, "ranks with the state": bool(state), "stored": stored, "steps": steps}


def fit(strategy: str, epochs: int, source: str | None, target: str | None) -> dict[str, Tensor]:
    """Train to an epoch from a checkpoint. Save one. Return the whole weights."""
    torch.manual_seed(4)
    module = WithForward()
    trainer = tw.Trainer(**{**QUIET, "accelerator": "cpu"}, strategy=strategy, max_epochs=epochs)
    trainer.fit(module, make_loader(shuffle=True), ckpt_path=source)
    if target is not None:
        trainer.save_checkpoint(target)
    whole = tw.gather_module(module, all_ranks=True)
    assert whole is not None
    return {name: value.detach().clone() for name, value in whole.state_dict().items()}
