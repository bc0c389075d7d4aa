"""The job of test_averaged.py: averaged weights on a rank under every strategy, and on one process."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from small import QUIET, Classifier, make_loader, weights
from torch import Tensor

import trainwright as tw

PARALLEL = ["ddp", "ddp_sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
LOW = "bf16-true"
MOVES = [
    ("ddp", "fsdp"),
    ("fsdp", "ddp_sharded"),
    ("deepspeed_stage_1", "deepspeed_stage_3"),
    ("deepspeed_stage_3", "deepspeed_stage_2"),
]
"""(the strategy that saves a checkpoint, the strategy that loads it)."""
EPOCHS = 3


class Averaged(Classifier):
    """It has buffers, a mask and a layer that trains from the second epoch on."""

    scale: Tensor
    mask: Tensor

    def __init__(self, thaws: bool = True) -> None:
        super().__init__()
        self.thaws = thaws
        self.late = torch.nn.Linear(3, 3)
        torch.nn.init.eye_(self.late.weight)
        self.late.requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def on_train_epoch_start(self) -> None:
        self.late.requires_grad_(self.thaws and self.current_epoch > 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.scale *= 1.01
        self.count += 1
        return torch.nn.functional.cross_entropy(self.late(self.net(batch[0])) * self.scale, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.cross_entropy(self.late(self.net(batch[0])) * self.scale, batch[1]))


class Normed(Averaged):
    """Its batch norm reads only the inputs, so its statistics do not depend on the weights."""

    def __init__(self, thaws: bool = False) -> None:
        super().__init__(thaws)
        self.norm = torch.nn.BatchNorm1d(8, affine=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.0 * self.norm(batch[0]).sum()


class Stopped(Averaged):
    """A signal stops the run within a validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.global_step == 9 and batch_idx == 1 and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Failed(Averaged):
    """Every rank fails within a validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 9 and batch_idx == 1:
            raise RuntimeError("no more")
        super().validation_step(batch, batch_idx)


class Latest(tw.Callback):
    """Keeps the weights in training."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights = weights(module)


class Scores(tw.Callback):
    """Records the loss of every validation."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.found.append(float(trainer.callback_metrics["val_loss"]))


def ema() -> tw.Callback:
    return tw.EMAWeightAveraging(decay=0.7, update_starting_at_step=2)


def swa() -> tw.Callback:
    return tw.StochasticWeightAveraging(0.01, 2, annealing_epochs=2)


def train(
    folder: Path | None,
    ranks: int,
    resume: Path | str | None = None,
    average: tw.Callback | None = None,
    thaws: bool = True,
    kind: type[Averaged] = Averaged,
    samples: int = 48,
    saved: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train with checkpoints in `folder`, and return the whole weights and the scores."""
    scores, module = Scores(), kind(thaws)
    callbacks: list[Any] = [scores, average or ema()]
    if folder is not None:
        callbacks.append(tw.ModelCheckpoint(folder, "best", monitor="val_loss"))
        callbacks.append(tw.ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=5))
    settings = {**QUIET, "max_epochs": EPOCHS, "val_check_interval": 3, "callbacks": callbacks, **options}
    trainer = tw.Trainer(**settings | {"enable_checkpointing": folder is not None})
    loader = make_loader(samples, 8 // ranks)
    trainer.fit(module, loader, make_loader(20), ckpt_path=resume)
    if saved is not None:
        trainer.save_checkpoint(saved)
    again = trainer.validate(module, make_loader(20), verbose=False)[0]["val_loss"]
    whole = tw.gather_module(module)
    return {"weights": None if whole is None else weights(whole), "scores": scores.found, "again": again}


def averaged_quickly(folder: Path) -> dict[str, Any]:
    """Train under fsdp, whole and resumed."""
    options: dict[str, Any] = {"strategy": "fsdp", "devices": 2}
    return {
        "whole": train(folder / "fsdp", 2, **options),
        "resumed": train(None, 2, folder / "fsdp" / "step=10.ckpt", **options),
    }


def thaws_under(strategy: str) -> bool:
    """Return whether parameters may be unfrozen between epochs."""
    return not strategy.startswith("deepspeed")


def averaged(folder: Path) -> dict[str, Any]:
    """Train under every strategy with both kinds of averages, whole and resumed."""
    found: dict[str, Any] = {}
    for strategy in PARALLEL:
        options: dict[str, Any] = {"strategy": strategy, "devices": 2, "thaws": thaws_under(strategy)}
        norm = {**options, "kind": Normed, "samples": 44, "thaws": False}
        of_swa = folder / f"swa-{strategy}"
        found[strategy] = {
            "whole": train(folder / strategy, 2, **options),
            "resumed": train(None, 2, folder / strategy / "step=10.ckpt", **options),
            "low": train(folder / f"low-{strategy}", 2, precision=LOW, **options),
            "low resumed": train(None, 2, folder / f"low-{strategy}" / "step=10.ckpt", precision=LOW, **options),
            "swa": train(of_swa, 2, average=swa(), **norm),
            "swa resumed": train(None, 2, of_swa / "step=10.ckpt", swa(), **norm),
        }
    for source, target in MOVES:
        path, thaws = folder / source / "step=10.ckpt", thaws_under(source)
        train(
            None, 2, path, strategy=target, devices=2, thaws=thaws, max_steps=10, saved=folder / f"{source} as {target}"
        )
    return found


def cut(folder: Path) -> dict[str, Any]:
    """Stop a validation and resume the run, and then make a validation fail."""
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp", "deepspeed_stage_3"):
        options: dict[str, Any] = {"strategy": strategy, "devices": 2, "thaws": False}
        with suppress(tw.RunStopped):
            train(folder / strategy, 2, kind=Stopped, **options)
        resumed = train(None, 2, folder / strategy / "stop-step=9.ckpt", **options)
        found[strategy] = {"whole": train(None, 2, **options), "resumed": resumed}
    module, latest = Failed(thaws=False), Latest()
    settings = {**QUIET, "devices": 2, "max_epochs": 2, "val_check_interval": 3}
    with suppress(RuntimeError):
        tw.Trainer(**settings, callbacks=[latest, ema()]).fit(module, make_loader(48, 4), make_loader(20))
    return {**found, "failed": (weights(module), latest.weights)}
