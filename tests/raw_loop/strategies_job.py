"""The job of test_strategies.py: a Trainer's checkpoint in an Accelerator and back, and the files of the model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from small import QUIET, Classifier, assert_close, assert_equal, loss_of, make_loader
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

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
    trains_one = strategy.startswith("deepspeed")
    assert_close(players(strategy, trains_one), players("ddp", trains_one))
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
    return {name: value.detach().clone() for name, value in whole.state_dict().items()}


def players(strategy: str, together: bool) -> dict[str, Tensor]:
    """Train two models with an optimizer each, prepared in two calls, or with one for both. Return the whole weights."""
    accelerator = tw.Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
    torch.manual_seed(2)
    nets = [nn.Sequential(nn.Linear(n, 7), nn.Tanh(), nn.Linear(7, m)) for n, m in ((5, 1), (3, 5))]
    loader = accelerator.prepare(DataLoader(torch.randn(16, 8), batch_size=2))
    if together:
        groups = [{"params": net.parameters()} for net in nets]
        critic, maker, *optimizers = accelerator.prepare(*nets, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    else:
        critic, first = accelerator.prepare(nets[0], torch.optim.AdamW(nets[0].parameters(), lr=0.02))
        maker, second = accelerator.prepare(nets[1], torch.optim.SGD(nets[1].parameters(), lr=0.1, momentum=0.9))
        optimizers = [first, second]
    for batch in loader:
        with accelerator.accumulate(critic, maker):
            accelerator.backward((softplus(-critic(batch[:, 3:])) + softplus(critic(maker(batch[:, :3])))).mean())
            accelerator.clip_grad_norm_((nn.ModuleList(nets) if together else critic).parameters(), 0.2)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    whole = [tw.gather_module(net, all_ranks=True) for net in nets]
    accelerator.engine.close()
    return {
        f"{i}.{name}": value.detach().clone() for i, net in enumerate(whole) for name, value in net.state_dict().items()
    }
