"""A model of 0.2 billion parameters on four ranks, whose memory every rank measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small import QUIET
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

WORDS, WIDTH, LAYERS, HEADS, LENGTH = 2048, 1152, 12, 4, 16
MIB = 1 << 20


class LanguageModel(tw.Module):
    """A transformer that is made on the meta device."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.width, self.layers = width, layers

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        width, options = self.width, {"dropout": 0.0, "batch_first": True, "norm_first": True}
        with torch.device("meta"):
            self.words = nn.Embedding(WORDS, width)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(width, HEADS, 4 * width, **options) for _ in range(self.layers)
            )
            self.out = nn.Linear(width, WORDS)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.words(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.out(hidden).flatten(0, 1), batch[0].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Memory(tw.Callback):
    """Measures the peak growth of the process in MiB, by phase of a run."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.peaks: dict[str, float] = {}
        self.sums: list[float] = []
        """Of the parameters' shards at the start of the training."""

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on

    def end(self, phase: str) -> None:
        self.peaks[phase] = (resident("VmHWM") - self.base) / MIB
        self.begin()

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.end("setup")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.end("load")
        self.sums = [shard.double().sum().item() for shard in shards(module)]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.end("step")


def resident(name: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def rows() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(8 * LENGTH).view(8, LENGTH)))


def fit(module: LanguageModel, steps: int, base: int, ckpt_path: Path | None = None) -> tuple[tw.Trainer, Memory]:
    memory = Memory(base)
    trainer = tw.Trainer(devices=4, strategy="fsdp", max_steps=steps, callbacks=[memory], **QUIET)
    memory.begin()
    trainer.fit(module, rows(), ckpt_path=ckpt_path)
    return trainer, memory


def shards(module: nn.Module) -> list[Tensor]:
    return [parameter.to_local().detach() for parameter in module.parameters()]


def warm_up(folder: Path) -> int:
    """Run a small model, which loads the libraries' code, and return the resident bytes."""
    trainer, _ = fit(LanguageModel(16, 1), 1, 0)
    trainer.save_checkpoint(str(folder / "small.ckpt"))
    return resident("VmRSS")


def train(folder: Path) -> dict[str, Any]:
    """Train a step and save."""
    base = warm_up(folder)
    module = LanguageModel()
    trainer, memory = fit(module, 1, base)
    memory.begin()
    trainer.save_checkpoint(str(folder / "large.ckpt"))
    memory.end("save")
    count, block = (sum(each.numel() for each in part.parameters()) for part in (module, module.blocks[0]))
    sums = [shard.double().sum().item() for shard in shards(module)]
    return {"peaks": memory.peaks, "count": count, "block": block, "sums": sums}


def resume(folder: Path) -> dict[str, Any]:
    """Load the checkpoint in another process and train another step."""
    _, memory = fit(LanguageModel(), 2, warm_up(folder), folder / "large.ckpt")
    return {"peaks": memory.peaks, "sums": memory.sums}
