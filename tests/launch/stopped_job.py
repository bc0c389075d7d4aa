"""A small run with randomness and counters, to be stopped anywhere: `stopped_job.py <folder> <devices> <pause> <strategy>`.

It resumes from the newest checkpoint of its folder. Rank 0 prints a numbered line at every event. All ranks record their
batches, and save a checkpoint at the end.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from small import QUIET, Classifier, make_data
from torch.utils.data import DataLoader, Dataset

import trainwright as tw
from trainwright.checkpoint.discovery import find_checkpoints


class Augmented(Dataset[Any]):
    """Items with noise that the workers draw."""

    def __init__(self, samples: int) -> None:
        self.data = make_data(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        values, label = self.data[index]
        return values + 0.1 * torch.randn(8) + 0.01 * random.random(), label, index


class Net(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        torch.rand(1)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class Events(tw.Callback):
    """Prints every event of the run, and pauses there."""

    def __init__(self, folder: Path, pause: float) -> None:
        self.folder, self.pause, self.count = folder, pause, 0

    def say(self, trainer: tw.Trainer, where: str) -> None:
        if trainer.is_global_zero:
            self.count += 1
            print(f"event {self.count} {where}", flush=True)
        time.sleep(self.pause)

    def on_sanity_check_start(self, trainer: tw.Trainer, module: Any) -> None:
        self.say(trainer, "sanity check")

    def on_train_batch_start(self, trainer: tw.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.say(trainer, "batch")

    def on_train_batch_end(self, trainer: tw.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with (self.folder / f"seen-{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.current_epoch} {batch_idx} {batch[2].tolist()} {float(batch[0].sum())}\n")

    def on_validation_batch_start(self, trainer: tw.Trainer, *_: Any) -> None:
        self.say(trainer, "validation")

    def on_save_checkpoint(self, trainer: tw.Trainer, *_: Any) -> None:
        self.say(trainer, "save")


def main(folder: Path, devices: int, pause: float, strategy: str) -> None:
    torch.manual_seed(11)
    saver = tw.ModelCheckpoint(dirpath=folder / "checkpoints", save_top_k=-1, every_n_train_steps=3)
    settings = {**QUIET, "enable_checkpointing": True, "num_sanity_val_steps": 1, "val_check_interval": 6}
    trainer = tw.Trainer(
        devices=devices,
        strategy=strategy,
        max_epochs=6,
        accumulate_grad_batches=3,
        callbacks=[saver, Events(folder, pause)],
        **settings,
    )
    module = Net(dropout=0.3)
    shuffled = DataLoader(Augmented(88), batch_size=4, shuffle=True, num_workers=2)
    found = find_checkpoints(str(folder / "checkpoints"))
    loaders = shuffled, DataLoader(Augmented(24), batch_size=4)
    trainer.fit(module, *loaders, ckpt_path=found[-1].path if found else None)
    trainer.save_checkpoint(folder / "final.ckpt")
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
