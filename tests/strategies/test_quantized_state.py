"""Checkpoints of torchao's 8-bit AdamW, whose state is in quantized tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, loss_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.strategies.divided_optimizers import refuse_undivided

pytestmark = pytest.mark.host

STEPS = 6
DDP = ("ddp", "ddp_sharded")
NOT_SHARDED = r"AdamW8bit is not known to step every element .*'ddp' or 'ddp_sharded'"


class Quantizes(tw.Module):
    """Trains two layers. Only the first is large enough to be quantized."""

    def __init__(self, bits: str = "AdamW8bit") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 3))
        self.bits = bits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        from torchao import optim

        optimizer = getattr(optim, self.bits)(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(strategy: str, ranks: int, *, max_steps: int = STEPS, path: str | None = None) -> tuple[Quantizes, tw.Trainer]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(8 * STEPS, 64, generator=generator), torch.randint(0, 3, (8 * STEPS,), generator=generator)
    )
    module = Quantizes()
    trainer = tw.Trainer(strategy=strategy, max_epochs=1, max_steps=max_steps, precision="bf16-mixed", **QUIET)
    with torch.compiler.set_stance("force_eager"):  # a step compiles otherwise
        trainer.fit(module, DataLoader(data, batch_size=8 // ranks), ckpt_path=path)
    return module, trainer


def interrupted(strategy: str, ranks: int, folder: Path) -> dict[str, Any]:
    """Return the results of a whole run and of a resumed one."""
    results: dict[str, Any] = {}
    half = str(folder / f"{strategy}.ckpt")
    fit(strategy, ranks, max_steps=STEPS // 2)[1].save_checkpoint(half)
    for name, path in (("whole", None), ("resumed", half)):
        module, trainer = fit(strategy, ranks, path=path)
        optimizer: Any = trainer.optimizers[0]
        state = optimizer.state.get(module.net[0].weight, {})
        results[name] = {**module.state_dict()}
        for key in ("exp_avg", "exp_avg_sq") if state else ():
            assert type(state[key]).__name__ == "OptimState8bit"
            assert state[key].signed == (key == "exp_avg")
            results[name] |= {f"{key} {part}": getattr(state[key], part) for part in ("codes", "scale", "qmap")}
        results[name] |= {"lr": optimizer.param_groups[0]["lr"]}
    return results


def on_ranks(folder: Path) -> dict[str, Any]:
    return {strategy: interrupted(strategy, 2, folder) for strategy in DDP}


def assert_equal_bits(results: dict[str, Any]) -> None:
    whole, resumed = results["whole"], results["resumed"]
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_8_bit_state_is_resumed_bitwise(tmp_path: Path) -> None:
    results = interrupted("single_device", 1, tmp_path)
    assert results["whole"]["exp_avg codes"].unique().numel() > 10
    assert not torch.equal(results["whole"]["net.0.weight"], Quantizes().net[0].weight)
    assert_equal_bits(results)


@pytest.mark.slow
def test_8_bit_state_of_ranks_is_resumed_bitwise(tmp_path: Path) -> None:
    ranks = run_job(on_ranks, 2, tmp_path)
    alone = interrupted("single_device", 1, tmp_path)["whole"]["net.0.weight"]
    for result in ranks:
        for strategy in DDP:
            assert_equal_bits(result[strategy])
            assert float((result[strategy]["whole"]["net.0.weight"] - alone).abs().max()) < 0.02
    weight, _ = fit("single_device", 1, path=str(tmp_path / "ddp.ckpt"))
    assert torch.isfinite(weight.net[0].weight).all()


def test_4_bit_state_is_rejected_at_a_save(tmp_path: Path) -> None:
    module = Quantizes("AdamW4bit")
    trainer = tw.Trainer(max_steps=1, **QUIET)
    data = [(torch.randn(8, 64), torch.randint(0, 3, (8,)))]
    with torch.compiler.set_stance("force_eager"):
        trainer.fit(module, DataLoader(data, batch_size=None))
    with pytest.raises(tw.CheckpointError, match="OptimState4bit, whose values have a special format"):
        trainer.save_checkpoint(str(tmp_path / "four.ckpt"))


def test_8_bit_optimizers_are_rejected_where_a_rank_has_a_shard() -> None:
    optimizer = Quantizes().configure_optimizers()["optimizer"]
    with pytest.raises(ValueError, match=NOT_SHARDED):
        refuse_undivided(optimizer, "fsdp", False)
