"""The training that launching.py launches: `launching_job.py SAMPLES EPOCHS SETTINGS`. It resumes and records its steps."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

FOLDER = Path("..")


class Tiny(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def on_train_start(self) -> None:
        self.start = self.trainer.engine.broadcast(time.time())
        self.file = (FOLDER / f"steps-{os.getpid()}").open("w", buffering=1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rank, world = self.trainer.global_rank, self.trainer.world_size
        line = {"step": self.trainer.global_step, "time": time.time(), "start": self.start, "pid": os.getpid()}
        line |= {
            "rank": rank,
            "world": world,
            "epoch": self.trainer.current_epoch,
            "samples": batch[0].flatten().tolist(),
        }
        print(json.dumps(line), file=self.file)
        if rank == world - 1 and (FOLDER / "raise").exists():
            raise RuntimeError("boom")
        if rank == world - 1 and (FOLDER / "exit").exists():
            sys.exit(3)
        time.sleep(0.05)
        loss: Tensor = self.layer(batch[0]).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    samples = TensorDataset(torch.arange(float(sys.argv[1]))[:, None])
    epochs, settings = int(sys.argv[2]), json.loads(sys.argv[3])
    saves = tw.ModelCheckpoint(dirpath=FOLDER / "saves", every_n_train_steps=5)
    trainer = tw.Trainer(max_epochs=epochs, callbacks=[saves], logger=False, enable_progress_bar=False, **settings)
    trainer.fit(Tiny(), DataLoader(samples, batch_size=4, shuffle=True), ckpt_path="auto")
