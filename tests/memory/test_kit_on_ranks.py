"""Activation checkpointing and weights by tokens under every strategy, against one process with one large batch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

STRATEGIES = ("ddp", "ddp_sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
generator = torch.Generator().manual_seed(0)
WORDS = torch.randint(0, 50, (22, 9), generator=generator)  # 22: the last round of two ranks is uneven
MASKS = torch.arange(9)[None] < torch.randint(2, 9, (22, 1), generator=generator)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Words(tw.Module):
    """Its loss is the sum over the tokens, or with `mean` the mean of the batch."""

    def __init__(self, mean: bool = False) -> None:
        super().__init__()
        self.net, self.mean = Net(), mean

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        words, mask = batch
        losses = F.cross_entropy(self.net(words).flatten(0, 1), words.flatten(), reduction="none")[mask.flatten()]
        return losses.mean() if self.mean else {"loss": losses.sum(), "num_tokens": mask.sum()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def weights(module: nn.Module) -> dict[str, Tensor]:
    whole = tw.gather_module(module, all_ranks=True)
    return {name: value.detach().clone() for name, value in whole.named_parameters()}


def data(batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(WORDS, MASKS), batch_size=batch_size)


def trained(strategy: str, **settings: Any) -> dict[str, Tensor]:
    module = Words()
    settings = {**QUIET, "strategy": strategy, "max_epochs": 2, "gradient_clip_val": 0.5} | settings
    tw.Trainer(accumulate_by="tokens", **settings).fit(module, data(settings.pop("batch_size", 2)))
    return weights(module)


def looped(strategy: str) -> dict[str, Tensor]:
    """The same in a raw loop, with `accumulate` and without."""
    steps = {"cpu": True, "strategy": strategy, "accumulate_by": "tokens", "gradient_accumulation_steps": 2}
    accelerator = tw.Accelerator(**steps, activation_checkpointing={Block})
    module = Net()
    model, optimizer, loader = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.5), data(2))
    for _ in range(2):
        for words, mask in loader:
            with accelerator.accumulate(model):
                losses = F.cross_entropy(model(words).flatten(0, 1), words.flatten(), reduction="none")
                accelerator.backward((losses * mask.flatten()).sum(), num_tokens=int(mask.sum()))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.free_memory()
    return {f"net.{name}": value for name, value in weights(module).items()}


def job(folder: Path) -> dict[str, dict[str, Tensor]]:
    warnings.filterwarnings("ignore")  # of DeepSpeed, which another test looks at
    ends = {}
    for strategy in STRATEGIES:
        ends[strategy] = trained(strategy, accumulate_grad_batches=2)
        for option in (True, "selective", {Block}):
            settings = {"activation_checkpointing": option, "accumulate_grad_batches": 2}
            ends[f"{strategy}, {option}"] = trained(strategy, **settings)
        if not strategy.startswith("deepspeed"):
            ends[f"{strategy}, a loop"] = looped(strategy)
    return ends


@pytest.mark.slow
def test_every_strategy_trains_as_one_large_batch_on_one_process(tmp_path: Path) -> None:
    module = Words(mean=True)
    tw.Trainer(max_epochs=2, gradient_clip_val=0.5, **QUIET).fit(module, data(8))
    expected = weights(module)
    single = trained("auto", accumulate_grad_batches=4)
    for ends in ({"one process": single}, *run_job(job, 2, tmp_path, seconds=240.0)):
        for name, end in ends.items():
            for key, value in expected.items():
                torch.testing.assert_close(end[key], value, rtol=0.0, atol=1e-6, msg=f"{name}: {key}")
