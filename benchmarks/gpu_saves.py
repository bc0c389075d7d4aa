"""The saves of benchmarks/gpu.py: 1 GB of a model with Adam's state on the device, saved at the parent's command."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_loops import QUIET, accelerator_name, make_module
from gpu_pacer import Channel
from gpu_peers import make_accelerate, make_lightning
from gpu_probes import peak_memory_mib, reset_peak_memory, synchronize
from gpu_work import Work

Save = tuple[Callable[[Path], Any], Callable[[], Any]]
"""What saves to a path, and what waits until it is all there."""


class _Silent:
    """A pacer that does nothing: the one step before the saves is not timed."""

    def step(self) -> None:
        pass

    def saw(self, loss: torch.Tensor) -> None:
        pass


def _nothing() -> None:
    pass


def by_hand(work: Work) -> Save:
    model = work.model().to(work.device)
    optimizer = work.optimizer(model.parameters())
    work.loss_of(model, work.moved(next(iter(work.loader())))).backward()
    optimizer.step()
    return lambda path: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path), _nothing


def _trained(work: Work) -> Any:
    import trainwright as tw

    trainer = tw.Trainer(max_steps=1, accelerator=accelerator_name(work.device), devices=1, **QUIET)
    trainer.fit(make_module(work, _Silent()), work.loader())  # type: ignore[arg-type]
    return trainer


def trainwright(work: Work) -> Save:
    return _trained(work).save_checkpoint, _nothing


def trainwright_background(work: Work) -> Save:
    trainer = _trained(work)
    return lambda path: trainer.save_checkpoint(path, blocking=False), trainer.engine.finish_save


def lightning(work: Work) -> Save:
    trainer, module = make_lightning(work, _Silent())  # type: ignore[arg-type]
    trainer.limit_train_batches = 1
    trainer.fit(module, work.loader())
    return trainer.save_checkpoint, _nothing


def accelerate(work: Work) -> Save:
    accelerator = make_accelerate(work)
    plain = work.model().to(work.device)
    model, optimizer = accelerator.prepare(plain, work.optimizer(plain.parameters()))
    accelerator.backward(work.loss_of(model, work.moved(next(iter(work.loader())))))
    optimizer.step()
    return lambda path: accelerator.save_state(str(path)), _nothing


def run_saves(make: Callable[[Work], Save], work: Work, channel: Channel) -> None:
    """Save at each command of the parent; report how long the call took, and how long until everything was written."""
    began = time.perf_counter()
    save, wait = make(work)
    folder = Path(work.folder) / "saves"
    folder.mkdir()

    def timed(number: int) -> dict[str, Any]:
        path = folder / str(number)
        synchronize(work.device)
        start = time.perf_counter()
        save(path)
        called = time.perf_counter() - start
        wait()
        committed = time.perf_counter() - start
        written = sum(each.stat().st_size for each in [path, *path.rglob("*")] if each.is_file())
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return {"seconds": called, "committed": committed, "written_mb": written / 1e6}

    told = timed(0)
    channel.tell("warm", first=time.perf_counter() - began, **told)
    reset_peak_memory(work.device)
    number = 0
    while True:
        channel.command()
        number += 1
        channel.tell("turn", **timed(number), peak_mib=peak_memory_mib(work.device))
