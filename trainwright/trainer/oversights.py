"""Oversights: settings and loaders that let a run go well and yet cost its user time, each named in a warning."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import RandomSampler, SubsetRandomSampler

from trainwright.callbacks.base import Callback
from trainwright.callbacks.early_stopping import EarlyStopping
from trainwright.callbacks.timer import Timer
from trainwright.data.combined_loader import CombinedLoader, is_collection
from trainwright.devices.hardware import wait_for
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.settings import DEFAULT_MAX_EPOCHS, Settings

LONG_EPOCH = 100
"""Batches of an epoch in which waiting for data is worth measuring."""
WATCHED = 32
"""Batches of a run during which it is measured how long training waits for data."""
LONG_WAIT_SECONDS = 0.01
LARGE_WAIT = 0.3
"""A wait is worth a warning if a batch takes longer than this, and all of them this fraction of the time."""


def parts_of(loaders: Any) -> list[Any]:
    """Return a stage's loaders in a flat list."""
    return CombinedLoader(loaders).flattened if is_collection(loaders) else getattr(loaders, "flattened", [loaders])


def warn_of_open_end(settings: Settings, callbacks: list[Callback]) -> None:
    """Warn of a fit that ends after a number of epochs that its user has not chosen."""
    is_open = settings.max_epochs is None and settings.max_steps == -1 and settings.max_time is None
    if is_open and not any(isinstance(each, (EarlyStopping, Timer)) for each in callbacks):
        rank_zero_warn(
            f"max_epochs was not given, so fit trains {DEFAULT_MAX_EPOCHS} epochs. Pass max_epochs= (-1 for no limit), "
            "max_steps= or max_time=.",
            stacklevel=2,
        )


def warn_of_shuffling(loaders: Any, stage: str) -> None:
    """Warn of evaluation loaders that shuffle."""
    samplers = [getattr(loader, "sampler", None) for loader in parts_of(loaders)]
    if any(isinstance(sampler, (RandomSampler, SubsetRandomSampler)) for sampler in samplers):
        rank_zero_warn(
            f"the {stage} loader shuffles, so with a limit of batches each evaluation scores other samples. Pass "
            "shuffle=False.",
            stacklevel=2,
        )


def warn_of_evaluation_mode(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Warn of parts with dropout or batch norm that are in evaluation mode although an optimizer steps them."""
    stepped = {each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    for name, part in module.named_modules():
        # A layer without children was chosen separately, such as a batch norm that keeps its statistics.
        if part.training or not list(part.children()) or not any(map(_is_quiet, part.modules())):
            continue
        if not any(p.requires_grad and p in stepped for p in part.parameters()):
            continue
        shown = repr(name) if name else type(module).__name__
        rank_zero_warn(
            f"{shown} is in evaluation mode as training begins, as from_pretrained returns models: dropout and batch norm act "
            "as in evaluation. Call .train() in the module's __init__ or on_train_start, or freeze the parameters.",
            stacklevel=2,
        )
        return


def _is_quiet(layer: nn.Module) -> bool:
    """Return whether a layer would act in another way in training mode."""
    rate = getattr(layer, "p" if "Dropout" in type(layer).__name__ else "dropout", None)
    has_statistics = getattr(layer, "track_running_stats", False)
    return not layer.training and (has_statistics or (isinstance(rate, float) and rate > 0))


def watching(
    pairs: Iterator[Any],
    loaders: Any,
    device: torch.device,
    processes: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Any]:
    """Return the same batches, and warn after the first ones if training waits for them while cores are idle.

    `processes` is their number on this node, which divide its cores.
    """
    cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) // processes
    fewest = min(getattr(loader, "num_workers", cores) for loader in parts_of(loaders))
    if fewest + 1 >= cores:
        return pairs
    return chain(_watched(pairs, fewest, cores, device, clock), pairs)


def _watched(
    pairs: Iterator[Any], workers: int, cores: int, device: torch.device, clock: Callable[[], float]
) -> Iterator[Any]:
    yield from islice(pairs, 1)  # the first batch starts the workers
    begun, waited = clock(), 0.0
    for _ in range(WATCHED):
        asked = clock()
        pair = next(pairs, None)
        waited += clock() - asked
        if pair is None:
            return
        yield pair
    wait_for(device)  # what it still computes hides waits for data
    total = clock() - begun
    if waited > LARGE_WAIT * total and waited > LONG_WAIT_SECONDS * WATCHED:
        rank_zero_warn(
            f"training waits for data during {waited / total:.0%} of its time ({waited / WATCHED * 1000:.0f} ms for a batch): "
            f"the loader has num_workers={workers}, and this process {cores} cores. Pass a larger num_workers.",
            stacklevel=2,
        )
