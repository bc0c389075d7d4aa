"""A rank whose loss depends on no parameter, for example if a batch without targets returns a plain zero."""

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

WORLD = 2
RIGHT: dict[str, Any] = {
    "ddp": lambda: tw.DDPStrategy(find_unused_parameters=True),
    "ddp, buckets": lambda: tw.DDPStrategy(
        find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=0.0002
    ),
    "ddp_sharded": tw.ShardedDDPStrategy,
    "ddp_sharded, no buckets": lambda: tw.ShardedDDPStrategy(reduce_buffer_size=0),
    "deepspeed_stage_1": lambda: tw.DeepSpeedStrategy(stage=1),
    "deepspeed_stage_2": lambda: tw.DeepSpeedStrategy(stage=2),
}
REFUSED = ("ddp", "fsdp", "deepspeed_stage_3")
UNUSED = "These parameters got no gradient in the step: net.0.weight, net.0.bias, net.2.w"
UNREACHED = "the loss of training_step does not depend on any parameter"
PATHS = [(1, 1), (1, 0), (0, 1), (0, 0), (1, 1), (0, 0), (1, 0)]
"""Whether the loss depends on the parameters, by step and rank."""


class Empty(tw.Module):
    """Returns zero for some batches, and never uses the last layer if there is one."""

    def __init__(self, automatic: bool = True, has_spare: bool = True, as_dict: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization, self.as_dict = automatic, as_dict
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.spare = nn.Linear(4, 1) if has_spare else nn.Identity()

    def loss(self, x: Tensor, has_part: int) -> Tensor:
        return self.net(x).pow(2).mean() if has_part else torch.zeros((), requires_grad=True)

    def training_step(self, batch: tuple[Tensor, int], batch_idx: int) -> Any:
        if self.automatic_optimization:
            loss = self.loss(*batch)
            return {"loss": loss, "kept": batch_idx} if self.as_dict else loss
        optimizer = self.optimizers()
        self.manual_backward(self.loss(*batch))
        optimizer.step()
        optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.3)


def batches(paths: list[tuple[int, int]]) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 4, generator=generator), each) for pair in paths for each in pair]


def fit(module: Empty, strategy: Any, paths: list[tuple[int, int]], **options: Any) -> None:
    trainer = tw.Trainer(strategy=strategy, devices=WORLD, max_epochs=1, **{**QUIET, **options})
    trainer.fit(module, DataLoader(batches(paths), batch_size=None))  # type: ignore[arg-type]


def expected(window: int) -> list[Tensor]:
    """Return the weights of plain torch: one process adds the ranks' losses."""
    module = Empty()
    optimizer = module.configure_optimizers()
    given = batches(PATHS)
    steps = [given[at : at + WORLD * window] for at in range(0, len(given), WORLD * window)]
    for step in steps:
        for batch in step:
            (module.loss(*batch) / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in module.parameters()]


def runs(folder: Path) -> dict[str, Any]:
    quiet()
    found: dict[str, Any] = {}
    for window in (1, 2):
        right = expected(window)
        for (name, make), automatic in ((each, automatic) for each in RIGHT.items() for automatic in (True, False)):
            if not automatic and window > 1:
                continue
            module = Empty(automatic, as_dict=window > 1)
            fit(module, make(), PATHS, accumulate_grad_batches=window)
            weights = tw.gather_module(module, all_ranks=True).parameters()
            differences = [(one - other).abs().max().item() for one, other in zip(weights, right, strict=True)]
            found[f"{name}, {'automatic' if automatic else 'manual'}, {window}"] = max(differences)
    for name in REFUSED:  # on both ranks: an error on one would end the job
        with pytest.raises(RuntimeError) as refusal:
            fit(Empty(has_spare=False), name, [(1, 1), (1, 1), (0, 0)])
        found[name] = str(refusal.value)
    return found


@pytest.mark.slow
def test_a_rank_whose_loss_reaches_no_parameter_is_handled(tmp_path: Path) -> None:
    for rank in run_job(runs, WORLD, tmp_path):
        said = [rank.pop(name) for name in REFUSED]
        assert said[0].startswith(UNUSED)
        assert all(each.startswith(UNREACHED) for each in said[1:])
        assert len(rank) == 3 * len(RIGHT)
        assert {name: each for name, each in rank.items() if each > 1e-5} == {}
