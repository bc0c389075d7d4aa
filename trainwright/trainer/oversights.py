"""Oversights: settings and loaders that let a run go well and yet cost its user time, each named in a warning."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler

from trainwright.callbacks.base import Callback
from trainwright.callbacks.early_stopping import EarlyStopping
from trainwright.callbacks.timer import Timer
from trainwright.data.combined_loader import CombinedLoader, is_collection
from trainwright.devices.hardware import wait_for
from trainwright.engine.optimizers import AFTER_VALIDATIONS, SchedulerConfig
from trainwright.errors import did_you_mean
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.settings import DEFAULT_MAX_EPOCHS, Settings

LONG_EPOCH = 100
"""Batches of an epoch in which waiting for data is worth measuring."""
WATCHED = 32
"""Batches of a run during which it is measured how long training waits for data."""
VALIDATION_WORDS = {"val", "valid", "validation", "eval", "dev"}
"""Words in the names of metrics that only a validation logs."""
LONG_WAIT_SECONDS = 0.01
LARGE_WAIT = 0.3
"""A wait is worth a warning if a batch takes longer than this, and all of them this fraction of the time."""


def loaders_of(loaders: Any) -> list[DataLoader[Any]]:
    """Return the DataLoaders among a stage's loaders."""
    parts = CombinedLoader(loaders).flattened if is_collection(loaders) else getattr(loaders, "flattened", [loaders])
    return [each for each in parts if isinstance(each, DataLoader)]


def warn_of_open_end(settings: Settings, callbacks: list[Callback]) -> None:
    """Warn of a fit that ends after a number of epochs that its user has not chosen."""
    is_open = settings.max_epochs is None and settings.max_steps == -1 and settings.max_time is None
    if is_open and not any(isinstance(each, (EarlyStopping, Timer)) for each in callbacks):
        rank_zero_warn(
            f"max_epochs was not given, so fit trains {DEFAULT_MAX_EPOCHS} epochs. Pass max_epochs= (-1 for no limit), "
            "max_steps= or max_time=.",
            stacklevel=2,
        )


def warn_of_monitors(
    logged: set[str], callbacks: list[Callback], schedulers: list[SchedulerConfig], settings: Settings
) -> None:
    """Warn of metrics that are followed, and that validations have not `logged` in the sanity check or log too late.

    An error would be wrong: another hook may log them, or the same hook outside of the sanity check.
    """
    if not logged:
        return  # the hook may skip its work during the sanity check
    every, names = settings.check_val_every_n_epoch or 1, ", ".join(sorted(logged))
    for each in (*callbacks, *(each for each in schedulers if each.is_plateau)):
        name, asker = getattr(each, "monitor", None), type(getattr(each, "scheduler", each)).__name__
        if name in logged and isinstance(each, SchedulerConfig) and each.interval == "epoch" and each.frequency < every:
            problem = f"and steps after epoch {each.frequency}, before the first validation; {AFTER_VALIDATIONS}."
            rank_zero_warn(f"{asker} follows {name!r}, {problem}", stacklevel=2)
        elif name not in logged and VALIDATION_WORDS.intersection(re.split(r"[^a-z]+", str(name))):
            problem = f"and the validation of the sanity check has logged {names}. Log it, or change monitor."
            rank_zero_warn(f"{asker} follows {name!r}, {problem}{did_you_mean(name, logged)}", stacklevel=2)


def warn_of_shuffling(loaders: Any, stage: str) -> None:
    """Warn of evaluation loaders that shuffle."""
    if any(isinstance(each.sampler, (RandomSampler, SubsetRandomSampler)) for each in loaders_of(loaders)):
        rank_zero_warn(
            f"the {stage} loader shuffles, so with a limit of batches each evaluation scores other samples. Pass "
            "shuffle=False.",
            stacklevel=2,
        )


def warn_of_dropped_samples(loaders: Any) -> None:
    """Warn of a training loader with a single batch that leaves out samples."""
    for each in loaders_of(loaders):
        with suppress(TypeError, NotImplementedError):  # a dataset without a length
            size = each.batch_size or 0
            left_out = len(each.sampler) - size  # type: ignore[arg-type]
            if each.drop_last and len(each) == 1 and left_out > 0:
                rank_zero_warn(
                    f"the training loader has a single batch of {size} samples, since drop_last=True leaves out the other "
                    f"{left_out}. Pass a smaller batch_size, or drop_last=False.",
                    stacklevel=2,
                )


def warn_of_evaluation_mode(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Warn of parts with dropout or batch norm that are in evaluation mode although an optimizer steps them."""
    stepped = {each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    idle = {name: part for name, part in module.named_modules() if not part.training}
    outermost = {name: part for name, part in idle.items() if not name or name.rpartition(".")[0] not in idle}
    names = [
        repr(name) if name else type(module).__name__
        for name, part in outermost.items()
        # A layer without children was chosen by itself, such as a batch norm that keeps its statistics.
        if list(part.children())
        and any(p.requires_grad and p in stepped for p in part.parameters())
        and any(map(_is_quiet, part.modules()))
    ]
    if names:
        rank_zero_warn(
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} in evaluation mode as training begins, as "
            "from_pretrained returns models: dropout and batch norm act as in evaluation. Call .train() in the module's "
            "__init__ or on_train_start, or freeze the parameters.",
            stacklevel=2,
        )


def _is_quiet(layer: nn.Module) -> bool:
    """Return whether a layer would act in another way in training mode."""
    rate = getattr(layer, "p" if "Dropout" in type(layer).__name__ else "dropout", None)
    has_statistics = isinstance(layer, _NormBase) and layer.track_running_stats
    return not layer.training and (has_statistics or (isinstance(rate, float) and rate > 0))


def watching(
    pairs: Iterator[Any],
    loaders: Any,
    device: torch.device,
    processes: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Any]:
    """Return the same batches; a warning comes after the first ones if training waits for them while cores are idle.

    `processes` are those of this node, which divide its cores.
    """
    cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) // processes
    fewest = min((each.num_workers for each in loaders_of(loaders)), default=cores)
    if fewest + 1 >= cores:
        return pairs
    return chain(_watched(pairs, fewest, cores, device, clock), pairs)


def _watched(
    pairs: Iterator[Any], workers: int, cores: int, device: torch.device, clock: Callable[[], float]
) -> Iterator[Any]:
    yield from islice(pairs, 1)  # the first batch starts the workers
    begun, waited, count = clock(), 0.0, 0
    while count < WATCHED:
        asked = clock()
        pair = next(pairs, None)
        waited += clock() - asked
        if pair is None:
            return
        count += 1
        yield pair
    wait_for(device)  # what it still computes hides waits for data
    total = clock() - begun
    if waited > LARGE_WAIT * total and waited > LONG_WAIT_SECONDS * count:
        rank_zero_warn(
            f"training waits for data during {waited / total:.0%} of its time ({waited / count * 1000:.0f} ms for a batch): "
            f"the loader has num_workers={workers}, and this process {cores} cores. Pass a larger num_workers.",
            stacklevel=2,
        )
