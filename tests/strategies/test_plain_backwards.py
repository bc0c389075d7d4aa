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
    """Calls loss.backward() from its second batch on, or from its first one."""

    def __init__(self, since: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization, self.since, self.done = False, since, 0
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.net(batch).pow(2).mean()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if batch_idx < self.since:
            self.manual_backward(loss)
        else:
            loss.backward()
        optimizer.step()
        self.done += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(since: int, strategy: Any, devices: int, **options: Any) -> int:
    module = Plain(since)
    data = list(torch.randn(4 * devices, 2, 4, generator=torch.Generator().manual_seed(0)))
    trainer = tw.Trainer(strategy=strategy, devices=devices, max_epochs=1, **{**QUIET, **options})
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return module.done


def test_one_process_takes_it_unless_the_loss_is_to_be_scaled() -> None:
    assert fit(0, "auto", 1) == 4
    assert fit(4, "auto", 1, precision="16-mixed") == 4
    with pytest.raises(
        RuntimeError, match=r"loss.backward\(\) has given 'net.0.weight' a gradient, .* self.manual_backward"
    ):
        fit(0, "auto", 1, precision="16-mixed")


def refused(folder: Path) -> dict[str, str]:
    quiet()
    found = {}
    for name, make in STRATEGIES.items():
        assert fit(4, make(), 2) == 4, name
        for since in (0, 1):
            with pytest.raises(RuntimeError) as refusal:
                fit(since, make(), 2)
            found[f"{name}, {since}"] = str(refusal.value)
    return found


@pytest.mark.slow
def test_several_ranks_refuse_it(tmp_path: Path) -> None:
    for rank in run_job(refused, 2, tmp_path):
        assert len(rank) == 2 * len(STRATEGIES)
        for name, said in rank.items():
            assert said.startswith("loss.backward() "), (name, said)
            assert "self.manual_backward(loss)" in said, (name, said)
