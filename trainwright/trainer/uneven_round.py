"""Uneven rounds: the rounds in which some rank has fewer samples than another, or none: a ghost.

A rank without a sample runs the step on another's batch, for the collectives in it and for the gradients, which weigh nothing
there. What that leaves behind is taken back: nothing is logged, and Metric objects, buffers, lists and other collections of
the module, and of callbacks that collect, are as they were. Hooks are called all the same: they may save or communicate. What
the optimizer's step leaves stays, since each rank makes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainwright.metric_kinds import is_collection, is_metric
from trainwright.module import Module

if TYPE_CHECKING:
    from torchmetrics import Metric

    from trainwright.callbacks.base import Callback
    from trainwright.trainer.metrics import MetricCollector

OF_TORCH = frozenset(vars(Module()))
"""Attributes of a module that are not its author's."""


class UnevenRound:
    """One batch of an uneven round, from before its first hook until `end`.

    Args:
        collector: is told, so that gathers may fill up and a ghost logs nothing.
        module: what a ghost must not change but by its optimizers' steps.
        callbacks: what a ghost's hooks may have collected in is put back, of those that collect.
        is_ghost: whether this rank has no sample of its own.
    """

    def __init__(
        self, collector: MetricCollector, module: nn.Module, callbacks: Iterable[Callback], is_ghost: bool
    ) -> None:
        self._collector = collector
        collector.begin_uneven_round(silent=is_ghost)
        self._module, self._is_ghost = module, is_ghost
        self._callbacks = [each for each in callbacks if not each.counts_rounds] if is_ghost else []
        self._undo: list[Callable[[], None]] = []
        self._given_back = [
            _taking_nothing(child)
            for child in (module.modules() if is_ghost else ())
            if is_metric(child) and child.dist_sync_on_step
        ]
        self._keep()

    def _keep(self) -> None:
        if not self._is_ghost:
            return
        seen: set[int] = set()
        for child in self._module.modules():
            if not is_metric(child):
                self._undo += _of_module(child, seen)
            elif not child.dist_sync_on_step:
                self._undo.append(_restoring(child))
        for callback in self._callbacks:
            self._undo += _of_attributes(vars(callback), seen)

    def put_back(self) -> None:
        """Take back what a ghost has left so far. What comes next stays: the optimizer's step, which each rank makes."""
        for undo in self._undo:
            undo()
        self._undo = []

    def renew(self) -> None:
        """Take back what a ghost has left so far, as before a hook that may save, and what it leaves from here on."""
        self.put_back()
        self._keep()

    def end(self) -> None:
        """Take back what a ghost has left."""
        self._collector.end_uneven_round()
        self.put_back()
        for give_back in self._given_back:
            give_back()
        self._given_back = []


@dataclass
class Communication:
    """What of an evaluation's batch communicates, as this rank's first one has shown: other ranks may wait for it in the last.

    A rank that has had none of a loader runs the step to be sure, and the hooks but for those of a prediction, which are there
    to write what they are given.
    """

    in_step: bool = True
    in_hooks: bool = True

    def learn(self, counts: list[int | None], always: bool) -> None:
        """Take the numbers of collectives before the first hooks, before the step, after it, and after the last hooks."""
        known = [each for each in counts if each is not None]
        if len(known) == len(counts):
            start, before, after, end = known
            self.in_step, self.in_hooks = always or after > before, before > start or end > after


@contextmanager
def discarded(module: nn.Module, collector: MetricCollector | None) -> Iterator[None]:
    """Throw away what the block logs and what it adds to the module's torchmetrics."""
    undo = [_restoring(child) for child in module.modules() if is_metric(child)]
    try:
        with nullcontext() if collector is None else collector.silenced():
            yield
    finally:
        for each in undo:
            each()


def _restoring(metric: Metric) -> Callable[[], None]:
    """Return what puts a Metric object back."""
    states, count = metric._copy_state_dict(), metric._update_count

    def restore() -> None:
        for name, value in states.items():
            setattr(metric, name, value)
        metric._update_count, metric._computed = count, None

    return restore


def _taking_nothing(metric: Metric) -> Callable[[], None]:
    """Let a Metric object that gathers at each step take part with no sample; return what ends that.

    What it gathers are the other ranks' samples, which it keeps, as each of them does.
    """
    update = metric.__dict__["update"]

    def take_nothing(*args: Any, **kwargs: Any) -> None:
        metric._computed = None
        metric._update_count += 1

    metric.__dict__["update"] = take_nothing
    return partial(metric.__dict__.__setitem__, "update", update)


def _of_module(module: nn.Module, seen: set[int]) -> list[Callable[[], None]]:
    undo: list[Callable[[], None]] = []
    if is_collection(module):
        return undo
    for name, buffer in module._buffers.items():
        if buffer is not None and not buffer.is_meta:
            undo.append(partial(_put_back_buffer, module, name, buffer, buffer.detach().clone()))
    own = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
    for value in own.values():
        if isinstance(value, Tensor) and not value.is_meta and value.is_leaf:
            undo.append(partial(_put_back_values, value, value.detach().clone()))
    return undo + _of_attributes(vars(module), seen, OF_TORCH)


def _of_attributes(
    attributes: dict[str, Any], seen: set[int], left_out: frozenset[str] = frozenset()
) -> list[Callable[[], None]]:
    """Return what an object's attributes are put back by: which they are, and what collections among them hold.

    A number that grew by one counts batches, as it does on each rank, and goes on.
    """
    own = {name: value for name, value in attributes.items() if name not in left_out}
    undo = [restore for value in own.values() for restore in _of_collection(value, seen)]

    def restore() -> None:
        for name, value in own.items():
            now = attributes.get(name)
            if now is not value and not _counts_on(value, now):
                attributes[name] = value

    return [*undo, restore]


def _of_collection(value: Any, seen: set[int]) -> list[Callable[[], None]]:
    if not isinstance(value, (list, set, deque, MutableMapping)) or id(value) in seen:
        return []
    seen.add(id(value))
    held: Any = list(value.items()) if isinstance(value, MutableMapping) else list(value)
    inner = [] if isinstance(value, set) else [each[1] for each in held] if isinstance(value, MutableMapping) else held
    undo = [restore for each in inner for restore in _of_collection(each, seen)]

    def restore() -> None:
        value.clear()
        if isinstance(value, MutableMapping):
            for key, each in held:
                value[key] = each
        else:
            (value.update if isinstance(value, set) else value.extend)(held)

    return [*undo, restore]


def _put_back_buffer(module: nn.Module, name: str, buffer: Tensor, kept: Tensor) -> None:
    now = module._buffers.get(name)
    is_count = not buffer.dim() and not buffer.is_floating_point() and not buffer.is_complex()
    if is_count and now is not None and torch.equal(now, kept + 1):
        return
    _put_back_values(buffer, kept)
    module._buffers[name] = buffer


def _put_back_values(tensor: Tensor, kept: Tensor) -> None:
    tensor.data.copy_(kept)


def _counts_on(before: Any, now: Any) -> bool:
    return type(before) is int and type(now) is int and now == before + 1
