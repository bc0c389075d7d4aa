"""Uneven rounds: the rounds in which some rank has fewer samples than another, or none.

A rank without samples runs a dummy batch, a copy of another rank's batch. It takes part in the step's collectives, and has no
weight in the gradients. Nothing is logged, and the module's Metric objects, buffers and plain attributes are restored. Its
hooks run, since they may save or communicate. The changes of the optimizer's step stay, since every rank makes that step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.distributed.vendor import count_issued
from trainwright.module import Module
from trainwright.trainer.metrics import MetricCollector
from trainwright.trainer.vendor import Undo, restore_of, take_nothing_in
from trainwright.value_kinds import is_collection, is_metric

OF_TORCH = frozenset(vars(Module()))
"""Attributes of every module."""


class UnevenRound:
    """One batch of an uneven round, from before its first hook until `end`. A dummy batch has no sample of this rank."""

    def __init__(self, collector: MetricCollector, module: nn.Module, is_dummy: bool) -> None:
        self._collector, self._module, self._is_dummy = collector, module, is_dummy
        collector.begin_uneven_round(silent=is_dummy)
        self._undo: list[Undo] = []
        metrics = (child for child in (module.modules() if is_dummy else ()) if is_metric(child))
        self._after: list[Undo] = [take_nothing_in(metric) for metric in metrics if metric.dist_sync_on_step]
        self.renew()

    def put_back(self) -> None:
        """Undo the effects of a dummy batch so far. Later effects, of the optimizer's step, stay."""
        undo, self._undo = self._undo, []
        for restore in undo:
            restore()

    def renew(self) -> None:
        """Undo the effects of a dummy batch so far, before a hook that may save, and its effects from here on."""
        self.put_back()
        for child in self._module.modules() if self._is_dummy else ():
            if not is_metric(child):
                self._undo.append(_of_module(child))
            elif not child.dist_sync_on_step:
                self._undo.append(restore_of(child))

    def end(self) -> None:
        self._collector.end_uneven_round()
        self.put_back()
        for undo in self._after:
            undo()
        self._after = []


@dataclass
class Communication:
    """Whether step and hooks of an evaluation communicate, as this rank's first batch showed: others may wait in the last.

    A rank that had no batch of a loader runs the step to be safe. It runs the hooks too, except in a prediction, where they
    write their arguments.
    """

    in_step: bool = True
    in_hooks: bool = True
    forward_is_collective: bool = False
    counts: list[int | None] = field(default_factory=list)
    """The numbers of collectives issued before the first hooks, before the step, after it, and after the last hooks."""

    def look(self) -> None:
        """Count the collectives issued so far. Called four times in the first batch, the last time after its last hooks."""
        self.counts.append(count_issued())
        known = [number for number in self.counts if number is not None]
        if len(known) == 4:
            start, before, after, end = known
            self.in_step = self.forward_is_collective or after > before
            self.in_hooks = before > start or end > after


@contextmanager
def discarded(module: nn.Module, collector: MetricCollector | None) -> Iterator[None]:
    """Discard the values that the block logs and its updates of the module's torchmetrics."""
    undo = [restore_of(child) for child in module.modules() if is_metric(child)]
    try:
        with nullcontext() if collector is None else collector.silenced():
            yield
    finally:
        for restore in undo:
            restore()


def _of_module(module: nn.Module) -> Undo:
    """Return a function that restores a module's buffers, and its attributes that are tensors, numbers or lists.

    A number that grew by one stays, because it counts batches, as on every rank.
    """
    saved: list[tuple[str, Any, Any]] = [
        (name, value, value.detach().clone() if isinstance(value, Tensor) else copy.copy(value))
        for name, value in chain(module.named_buffers(recurse=False), vars(module).items())
        if isinstance(value, (Tensor, list, int, float)) and name not in OF_TORCH and not is_collection(module)
    ]

    def restore() -> None:
        for name, value, before in saved:
            if _is_count(getattr(module, name, None), before):
                continue
            if isinstance(value, Tensor):
                value.data.copy_(before)
            elif isinstance(value, list):
                value[:] = before
            setattr(module, name, value)

    return restore


def _is_count(now: Any, before: Any) -> bool:
    if isinstance(before, Tensor):
        is_number = not before.dim() and not before.is_floating_point() and not before.is_complex()
        return is_number and isinstance(now, Tensor) and torch.equal(now, before + 1)
    return type(before) is int and type(now) is int and now == before + 1
