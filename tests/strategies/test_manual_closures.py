"""Closures in manual optimization, under strategies and precisions whose step cannot call them."""

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

STRATEGIES = ("ddp", "ddp_sharded", "fsdp", "deepspeed_stage_2")


class Closes(tw.Module):
    """Passes a clipping closure to the step, or calls it before. One parameter is a scalar."""

    def __init__(self, closes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.scale = nn.Linear(4, 1), nn.Parameter(torch.tensor(1.0))
        self.automatic_optimization = False
        self.closes, self.calls = closes, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            self.calls += 1
            optimizer.zero_grad()
            loss = 0.1 * (self.net(batch) * self.scale).square().mean()
            self.manual_backward(loss)
            if batch_idx % 2:
                self.clip_gradients(optimizer, gradient_clip_val=0.1)
            return loss

        if self.closes:
            assert optimizer.step(closure) is not None
        else:
            closure()
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Edits(tw.Module):
    """Edits its bias in optimizer_step, before a step with the loop's closure."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        with torch.no_grad():
            self.net.bias.clamp_(-0.1, 0.1)
        optimizer.step(closure)


def edited(data: Tensor) -> None:
    """Strategies with a special step do not call the closure of automatic optimization."""
    for strategy in ("ddp_sharded", "deepspeed_stage_2"):
        trainer = tw.Trainer(max_epochs=1, **{**QUIET, "devices": 2, "strategy": strategy})
        trainer.fit(Edits(), DataLoader(data, batch_size=4))
        assert trainer.global_step == 2


def closed(folder: Path) -> dict[str, list[Tensor]]:
    """Return the weights without and with a closure, by strategy and precision."""
    quiet()
    found: dict[str, list[Tensor]] = {}
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    edited(data)
    for strategy in STRATEGIES:
        for precision in ("32-true", "16-mixed"):
            for closes in (False, True):
                module = Closes(closes)
                settings = {**QUIET, "devices": 2, "strategy": strategy, "precision": precision}
                tw.Trainer(max_epochs=1, **settings).fit(module, DataLoader(data, batch_size=4))
                assert module.calls == 2
                whole = tw.gather_module(module, all_ranks=True)
                assert whole is not None
                weights_of = torch.cat([each.detach().reshape(-1) for each in whole.parameters()])
                found.setdefault(f"{strategy} {precision}", []).append(weights_of)
    return found


@pytest.mark.slow
@pytest.mark.host
def test_a_closure_of_a_manual_step_is_called_under_every_strategy(tmp_path: Path) -> None:
    one, other = run_job(closed, 2, tmp_path)
    for name, (plain, by_closure) in one.items():
        assert torch.equal(plain, by_closure), name
        assert torch.equal(by_closure, other[name][1]), name
