"""Resume on three ranks: with more than two, the order in which a sum is taken shows in its last bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, assert_equal, loss_of, make_loader, weights
from torch import Tensor, nn

import trainwright as tw
from trainwright.strategies.ddp.strategy import DDPStrategy


class Reordered(tw.Module):
    """Its layers are used in another order than they were made in, so that DDP rebuilds its buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.last, self.first, self.middle = nn.Linear(37, 3), nn.Linear(8, 29), nn.Linear(29, 37)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        net = nn.Sequential(self.first, nn.Tanh(), nn.Dropout(0.2), self.middle, nn.Tanh(), self.last)
        return loss_of(net, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def job(folder: Path) -> dict[str, Any]:
    def run(epochs: int, name: str, ckpt_path: str | None = None) -> dict[str, Tensor]:
        tw.seed_everything(4)
        callback = tw.ModelCheckpoint(str(folder / name), save_top_k=-1)
        strategy = DDPStrategy(
            bucket_cap_mb=0.0002
        )  # else a model of many megabytes would be needed for several buckets
        settings = {**QUIET, "enable_checkpointing": True}
        trainer = tw.Trainer(max_epochs=epochs, callbacks=callback, strategy=strategy, **settings)
        module = Reordered()
        trainer.fit(module, make_loader(50, 4, shuffle=True), ckpt_path=ckpt_path)
        (wrapper,) = strategy.wrapped.values()
        sizes = wrapper._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
        assert len(sizes) > 2, "the order of the buckets is what has to be kept"
        return weights(module)

    whole = run(4, "whole")
    run(1, "part")
    run(3, "part", "last")
    return {"whole": whole, "resumed": run(4, "part", "last")}


@pytest.mark.slow
def test_a_run_resumed_twice_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    results = run_job(job, 3, tmp_path)
    for result in results:
        assert_equal(result["resumed"], result["whole"])
        assert_equal(result["whole"], results[0]["whole"])
