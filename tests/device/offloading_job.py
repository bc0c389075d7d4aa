"""DeepSpeed and fsdp on a device, in a separate process that checks their state and their numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from small import QUIET, make_loader, make_net
from torch import Tensor, nn

import trainwright as tw

LIMIT = 64 << 20
"""DeepSpeed's default size of a buffer for reducing gradients takes 2 GB."""


class Scaled(tw.Module):
    """Has a parameter without dimensions, which fsdp keeps whole."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]) * self.scale, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def trained(
    strategy: Any, steps: int, index: int, *, ckpt_path: Any = None, save: Any = None, **more: Any
) -> dict[str, Any]:
    module = Scaled()
    settings = {**QUIET, "accelerator": "gpu", "devices": [index], "strategy": strategy, "max_steps": steps, **more}
    trainer = tw.Trainer(**settings, gradient_clip_val=0.5)
    trainer.fit(module, make_loader(), ckpt_path=ckpt_path)
    assert torch.accelerator.current_device_index() == index
    assert trainer.engine.device.index == index
    if save is not None:
        trainer.save_checkpoint(save)
    whole = tw.gather_module(module, all_ranks=True)
    return {name: value.detach().cpu() for name, value in whole.state_dict().items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def deepspeed(folder: Path) -> None:
    """Every stage on the last device, with a local rank that is not its number, resumed and in little memory."""
    index = torch.accelerator.device_count() - 1
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:2:16:8"  # 8 MiB a stream, instead of 32 on Hopper
    os.environ["LOCAL_RANK"] = "1" if index == 0 else "0"
    for stage in (1, 2, 3):
        name, path = f"deepspeed_stage_{stage}", folder / f"{stage}.ckpt"
        torch.accelerator.reset_peak_memory_stats()
        whole = trained(name, 6, index)
        assert torch.accelerator.max_memory_allocated() < LIMIT
        trained(name, 3, index, save=path)
        assert_equal(whole, trained(name, 6, index, ckpt_path=path))


def fsdp(folder: Path) -> None:
    """Shards in host memory are trained as those on the device, with a loss scale and a norm over both kinds."""
    index = torch.accelerator.device_count() - 1
    for precision in ("32-true", "16-mixed"):
        ends = []
        for offload in (False, True):
            strategy = tw.FSDPStrategy(cpu_offload=offload, min_parameters=50)
            ends.append(trained(strategy, 6, index, precision=precision))
        for name, value in ends[0].items():
            torch.testing.assert_close(value, ends[1][name], rtol=1e-5, atol=1e-6)
