"""Evaluate: validation and test, each sample counted once on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainwright.data.loaders import ShardedLoader, refuse_length
from trainwright.data.transfer import to_device
from trainwright.module import Module, is_metric
from trainwright.trainer.metrics import MetricCollector

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer


def evaluate(
    trainer: Trainer,
    module: Module,
    loader: ShardedLoader,
    stage: str,
    limit: int | float | None,
) -> dict[str, float]:
    """Run one evaluation ("validation" or "test") and return its metrics, over all ranks.

    Collective: call on every rank. Each submodule is in evaluation mode meanwhile, and as it was afterwards.
    """
    engine, hooks = trainer.engine, trainer.hooks
    engine.strategy.before_evaluation(engine.modules)
    collector = trainer.logbook.start(module, training=False)
    loader.set_epoch(engine.seed, 0)
    on_host, length = engine.device.type == "cpu", loader.exact_length
    num_batches = limited(length if length is not None or isinstance(limit, int) else loader.length, limit)
    if limit is None:
        num_batches = None  # to the loader's end, whatever it says of its length
    # Not inference_mode: what is made in it (a metric's state, a cache of the module's) breaks the training that follows.
    with torch.no_grad(), in_evaluation_mode(module):
        hooks.call(f"on_{stage}_start")
        hooks.call(f"on_{stage}_epoch_start")
        for index, batch in enumerate(islice(loader, num_batches)):
            if length is not None and index >= length:
                refuse_length(length)
            collector.batch = batch = batch if on_host else to_device(batch, engine.device)
            if loader.real_length is not None and index >= loader.real_length:
                with discarded(module, collector):  # this rank is out of batches; the others need it in their forward
                    engine.run(module, f"{stage}_step", batch, index)
                continue
            hooks.call(f"on_{stage}_batch_start", batch, index)
            outputs = engine.run(module, f"{stage}_step", batch, index)
            hooks.call(f"on_{stage}_batch_end", outputs, batch, index)
        collector.batch = None
        hooks.call(f"on_{stage}_epoch_end")
        metrics = trainer.logbook.finish(module)
        hooks.call(f"on_{stage}_end")
    return metrics


def sanity_check(trainer: Trainer, module: Module, loader: ShardedLoader) -> None:
    """Run a few validation batches before training, so that an error in validation_step costs no epoch. Collective."""
    if trainer.settings.num_sanity_val_steps == 0:
        return
    limit = trainer.num_val_batches
    if trainer.settings.num_sanity_val_steps != -1:
        limit = limited(trainer.num_val_batches, trainer.settings.num_sanity_val_steps)
    trainer.logbook.is_silent = True
    trainer.hooks.call("on_sanity_check_start")
    evaluate(trainer, module, loader, "validation", limit)
    trainer.hooks.call("on_sanity_check_end")
    trainer.logbook.is_silent = False


def limited(length: int | None, limit: int | float | None) -> int | None:
    """Return how many batches a limit leaves: a number of them, a fraction of a known length, or all (None)."""
    if limit is None:
        return length
    if isinstance(limit, float):
        if length is None:
            raise ValueError(
                f"a limit of {limit} is a fraction of the batches, but this loader has no length; pass a number of batches."
            )
        return max(int(length * limit), 1 if limit > 0 and length > 0 else 0)  # a fraction is one batch at least
    return limit if length is None else min(limit, length)


@contextmanager
def in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put every submodule into evaluation mode, and back to the mode that it was in."""
    was_training = {child: child.training for child in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for child, training in was_training.items():
            child.training = training


@contextmanager
def discarded(module: nn.Module, collector: MetricCollector | None) -> Iterator[None]:
    """Throw away what the block logs and what it adds to the module's torchmetrics."""
    metrics = [child for child in module.modules() if is_metric(child)]
    kept = [(metric, metric._copy_state_dict(), metric._update_count) for metric in metrics]
    if collector is not None:
        collector.silent = True
    try:
        yield
    finally:
        if collector is not None:
            collector.silent = False
        for metric, states, count in kept:
            for name, value in states.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, None
