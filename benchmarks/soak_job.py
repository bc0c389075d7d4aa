"""The training script that soak.py kills: everything in it that a resumed run could get wrong.

Shuffled data, random augmentation in loader workers, dropout and noise from every generator, accumulation that does not
divide the epoch, batch norm, a loss scale that changes and overflows, a scheduler by steps, metrics over an epoch,
validation within epochs, early stopping, and checkpoints by steps and by a metric. The same command resumes from the newest
checkpoint. It writes two logs: one line per batch and rank (which samples, which inputs, which loss), and one line per event (a
step, a validation, a save), by which soak.py times its kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainwright as tw
from trainwright.precision.mixed import MixedPrecision
from trainwright.trainer import resume, run_position

BATCH_SIZE, BATCHES, ACCUMULATE, VALIDATE_EVERY, SAVE_EVERY = 4, 16, 3, 4, 2
"""Samples of a batch, batches of an epoch on each rank, of a window and between validations; steps between saves."""
FEATURES, CLASSES = 8, 3
FINAL = "final.ckpt"
FORGETTABLE = ("generators", "scale", "early_stopping")
"""What of its state a resumed run can be told to leave out."""


def num_samples(num_ranks: int) -> int:
    """Return the number of samples: one less than full batches, so that the last round is uneven."""
    return num_ranks * BATCHES * BATCH_SIZE - 1


class Telling:
    """Appends each line to a file in one write, so that a kill leaves only whole lines."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def tell(self, **values: Any) -> None:
        os.write(self._file, (json.dumps(values) + "\n").encode())


class Augmented(Dataset[Any]):
    """Samples that are drawn again each time, from all three generators."""

    def __init__(self, samples: int, seed: int, is_random: bool, has_nan: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(samples, FEATURES, generator=generator)
        noise = torch.randn(samples, CLASSES, generator=generator)
        self.targets = (self.inputs[:, :CLASSES] + 0.5 * noise).argmax(dim=1)
        if has_nan:
            self.inputs[samples // 2] = float("nan")
        self.is_random = is_random

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        inputs = self.inputs[index]
        if self.is_random:
            inputs = inputs + 0.1 * (random.random() + float(np.random.rand()) + torch.rand_like(inputs))
        return inputs, self.targets[index], index


class Net(tw.Module):
    def __init__(self, batches: Telling, has_metrics: bool) -> None:
        super().__init__()
        self.batches, self.has_metrics = batches, has_metrics
        self.first, self.norm, self.middle = nn.Linear(FEATURES, 29), nn.BatchNorm1d(29), nn.Linear(29, 37)
        self.last = nn.Linear(37, CLASSES)
        if has_metrics:
            import torchmetrics

            self.train_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
            self.val_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs)))
        hidden = nn.functional.dropout(hidden, 0.3, self.training)
        logits: Tensor = self.last(torch.tanh(self.middle(hidden)))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, samples = batch
        noise = random.random() + float(np.random.rand()) + torch.randn_like(inputs)
        logits = self(inputs + 0.1 * noise)
        loss = nn.functional.cross_entropy(logits.float(), targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.has_metrics:
            self.train_accuracy(logits, targets)
            self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        self.batches.tell(
            epoch=self.current_epoch,
            batch=batch_idx,
            step=self.global_step,
            samples=samples.tolist(),
            inputs=zlib.crc32(inputs.numpy().tobytes()),
            loss=float(loss.detach()).hex(),
        )
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets, _ = batch
        logits = self(inputs)
        self.log("val_loss", nn.functional.cross_entropy(logits.float(), targets))
        if self.has_metrics:
            self.val_accuracy(logits, targets)
            self.log("val_accuracy", self.val_accuracy)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.last.parameters(), "weight_decay": 0.1},
            {"params": [*self.first.parameters(), *self.norm.parameters(), *self.middle.parameters()]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=0.002)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Events(tw.Callback):
    """Logs each event as it happens."""

    def __init__(self, events: Telling) -> None:
        self.events = events

    def tell(self, trainer: Any, event: str) -> None:
        self.events.tell(event=event, rank=trainer.global_rank, pid=os.getpid(), step=trainer.global_step)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.tell(trainer, "load")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.tell(trainer, "start")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.state.progress.is_within_window:
            self.tell(trainer, "step")

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if batch_idx == 0 and not trainer.sanity_checking:
            self.tell(trainer, "validation")

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self.tell(trainer, "save")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.tell(trainer, "end")


def forget(part: str) -> None:
    """Omit a part of a resumed run's state, for a soak that must detect it."""

    def nothing(*_: Any) -> None:
        pass

    if part == "generators":
        resume.set_rng_state = run_position.set_rng_state = nothing  # type: ignore[assignment]
    elif part == "scale":
        MixedPrecision.load_state_dict = nothing  # type: ignore[assignment]
    elif part == "early_stopping":
        tw.EarlyStopping.load_state_dict = nothing  # type: ignore[method-assign]


def allow_warnings_of_others() -> None:
    """Allow warnings from the packages of the strategies; any other warning ends the run."""
    for module in ("deepspeed", "fairscale", "pydantic"):
        warnings.filterwarnings("ignore", module=rf"{module}(\..*)?")


def train(options: argparse.Namespace) -> None:
    folder = Path(options.folder)
    tw.seed_everything(11)
    precision: Any = "32-true"
    if not options.strategy.startswith("deepspeed"):  # which has no float16 on a CPU, and so no loss scale
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2, backoff_factor=0.125)
        precision = MixedPrecision("16-mixed", "cpu", scaler)
    place = str(folder / "checkpoints")
    callbacks = [
        Events(Telling(options.events)),
        tw.EarlyStopping("val_loss", min_delta=0.1, patience=1000),
        tw.ModelCheckpoint(place, every_n_train_steps=SAVE_EVERY),
        tw.ModelCheckpoint(place, "best-{epoch}-{step}-{val_loss:.4f}", monitor="val_loss", save_top_k=2),
    ]
    trainer = tw.Trainer(
        accelerator="cpu",
        strategy=options.strategy,
        devices=options.devices,
        precision=precision,
        logger=[tw.CSVLogger(str(folder), "logs"), tw.TensorBoardLogger(str(folder), "logs")],
        callbacks=callbacks,  # type: ignore[arg-type]
        max_epochs=options.epochs,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        val_check_interval=VALIDATE_EVERY,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        hang_timeout=options.hang_timeout,
        nan_policy="skip" if options.with_nans else None,
    )
    module = Net(Telling(str(folder / f"batches-{trainer.global_rank}")), not options.without_torchmetrics)
    samples = num_samples(options.devices)
    loader: Any = DataLoader(Augmented(samples, 1, True, options.with_nans), BATCH_SIZE, shuffle=True, num_workers=2)
    final = folder / FINAL
    if trainer.is_global_zero and final.exists():
        os.rename(final, folder / f"earlier-{os.getpid()}")  # a run that was killed once it was there
    trainer.fit(module, loader, DataLoader(Augmented(27, 2, False), BATCH_SIZE), ckpt_path="auto")
    trainer.save_checkpoint(final)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--forget", default="", choices=("", *FORGETTABLE))
    parser.add_argument("--without-torchmetrics", action="store_true")
    parser.add_argument("--with-nans", action="store_true")
    parser.add_argument("--hang-timeout", type=float)
    options = parser.parse_args()
    options.events = os.environ["SOAK_EVENTS"]
    allow_warnings_of_others()
    forget(options.forget)
    train(options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
