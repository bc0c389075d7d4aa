"""The hand-written and trainwright loops of benchmarks/gpu.py; each trains until the pacer ends the process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from gpu_pacer import Pacer
from gpu_work import Batch, Work
from torch import Tensor

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "fused_optimizers": False,
}


def make_step(work: Work, pacer: Pacer, fused: bool | None = None) -> Callable[[Batch], Tensor]:
    """Return a hand-written step with torch's default flags, which maps a batch on the host to its loss."""
    model = work.model().to(work.device)
    if work.compile_options:
        model.compile(**work.compile_options)
    optimizer = work.optimizer(model.parameters(), fused)
    scaler = torch.amp.GradScaler(work.device.type) if work.amp_dtype is torch.float16 else None
    kind = work.device.type

    def step(on_host: Batch) -> Tensor:
        batch = work.moved(on_host)
        pacer.step()
        optimizer.zero_grad()
        with torch.autocast(kind, work.amp_dtype) if work.amp_dtype is not None else nullcontext():
            loss = work.loss_of(model, batch)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        pacer.saw(loss)
        return loss

    return step


def by_hand(work: Work, pacer: Pacer, fused: bool | None = None) -> None:
    step = make_step(work, pacer, fused)
    for batch in work.loader():
        step(batch)


def by_hand_fused(work: Work, pacer: Pacer) -> None:
    by_hand(work, pacer, fused=True)


def accelerator_name(device: torch.device) -> str:
    return "gpu" if device.type == "cuda" else device.type


def make_net(base: Any, work: Work, pacer: Pacer) -> Any:
    """Return the work as a module of a framework's class, which logs its loss in each step."""

    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = work.model()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            pacer.step()
            loss = work.loss_of(self.net, batch)
            self.log("loss", loss)
            pacer.saw(loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer(self.parameters())

    return Net()


def make_module(work: Work, pacer: Pacer) -> Any:
    import trainwright as tw

    return make_net(tw.Module, work, pacer)


def _train(work: Work, pacer: Pacer, **settings: Any) -> None:
    import trainwright as tw

    trainer = tw.Trainer(
        max_epochs=1,
        accelerator=accelerator_name(work.device),
        devices=1,
        precision=work.precision,
        compile=work.compile_options or False,
        default_root_dir=work.folder,
        **settings,
    )
    trainer.fit(make_module(work, pacer), work.loader())


def trainwright(work: Work, pacer: Pacer) -> None:
    """Bare, with the optimizer's flags unchanged."""
    _train(work, pacer, **QUIET)


def trainwright_default(work: Work, pacer: Pacer) -> None:
    """With every argument at its default: bar, logger, summary, a checkpoint, and the optimizer fused."""
    _train(work, pacer)


def trainwright_raw(work: Work, pacer: Pacer) -> None:
    """A hand-written loop with the Accelerator."""
    import trainwright as tw

    accelerator = tw.Accelerator(accelerator=accelerator_name(work.device), devices=1, precision=work.precision)
    plain = work.model().to(work.device)
    if work.compile_options:
        plain.compile(**work.compile_options)
    model, optimizer, loader = accelerator.prepare(plain, work.optimizer(plain.parameters()), work.loader())
    for batch in loader:
        pacer.step()
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            loss = work.loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
        pacer.saw(loss)
