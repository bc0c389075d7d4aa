"""`loss.backward()` in a step of manual optimization, where `self.manual_backward(loss)` is meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import quiet
from jobs import run_job
from small import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainwright as tw

STRATEGIES: dict[str, Any] = {
    "ddp": tw.DDPStrategy,
    "ddp_sharded": tw.ShardedDDPStrategy,
    "fsdp": tw.FSDPStrategy,
    "fsdp, groups": lambda: tw.FSDPStrategy(auto_wrap_policy={nn.Linear}),
    "deepspeed_stage_2": lambda: tw.DeepSpeedStrategy(stage=2),
}


class Plain(tw.Module):
    def __init__(self, is_plain: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization, self.is_plain, self.done = False, is_plain, 0
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.net(batch).pow(2).mean()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if self.is_plain:
            loss.backward()
        else:
            self.manual_backward(loss)
        optimizer.step()
        self.done += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(is_plain: bool, strategy: Any, devices: int, **options: Any) -> int:
    module = Plain(is_plain)
    data = list(torch.randn(4 * devices, 2, 4, generator=torch.Generator().manual_seed(0)))
    trainer = tw.Trainer(strategy=strategy, devices=devices, max_epochs=1, **{**QUIET, **options})
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return module.done


def test_one_process_takes_it_unless_the_loss_is_to_be_scaled() -> None:
    assert fit(True, "auto", 1) == 4
    assert fit(False, "auto", 1, precision="16-mixed") == 4
    with pytest.raises(RuntimeError, match=r"before any self.manual_backward\(loss\)"):
        fit(True, "auto", 1, precision="16-mixed")


def refused(folder: Path) -> dict[str, str]:
    quiet()
    found = {}
    for name, make in STRATEGIES.items():
        assert fit(False, make(), 2) == 4, name
        with pytest.raises(RuntimeError) as refusal:
            fit(True, make(), 2)
        found[name] = str(refusal.value)
    return found


@pytest.mark.slow
def test_several_ranks_refuse_it(tmp_path: Path) -> None:
    for rank in run_job(refused, 2, tmp_path):
        assert len(rank) == len(STRATEGIES)
        for name, said in rank.items():
            assert "self.manual_backward(loss)" in said, (name, said)
