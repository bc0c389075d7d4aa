"""Uneven rounds: the rounds in which some rank has fewer samples than another, or none.

A rank without samples runs a dummy batch, a copy of another rank's batch. It takes part in the step's collectives, and has no
weight in the gradients. Its effects are undone: nothing is logged, and Metric objects, buffers and collections of the module
and of callbacks are restored. Its hooks run, since they may save or communicate. The changes of the optimizer's step stay,
since every rank makes that step.

In an evaluation every rank may have a separate loader, which ends earlier on one rank than on another (`OwnRounds`). A rank
whose loader has ended repeats its last batch, as a dummy, because a step that communicates waits for all ranks. Known lengths
are exchanged once, before the first batch. Otherwise the ranks exchange at every batch whether they have one, as long as the
step or its hooks communicate.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainwright.data.transfer import map_leaves
from trainwright.distributed import collectives
from trainwright.distributed.vendor import count_issued
from trainwright.module import Module
from trainwright.trainer.metrics import MetricCollector
from trainwright.trainer.stage import Shard
from trainwright.value_kinds import is_collection, is_metric

if TYPE_CHECKING:
    from torchmetrics import Metric

    from trainwright.callbacks.base import Callback

END: Any = object()
OF_TORCH = frozenset(vars(Module()))
"""Attributes of every module."""

Undo = Callable[[], None]


class UnevenRound:
    """One batch of an uneven round, from before its first hook until `end`. A dummy batch has no sample of this rank."""

    def __init__(
        self, collector: MetricCollector, module: nn.Module, callbacks: Iterable[Callback], is_dummy: bool
    ) -> None:
        self._collector, self._module, self._is_dummy = collector, module, is_dummy
        collector.begin_uneven_round(silent=is_dummy)
        self._callbacks = [each for each in callbacks if not each.counts_rounds]
        self._undo: list[Undo] = []
        self._after: list[Undo] = [
            _taking_nothing(child)
            for child in (module.modules() if is_dummy else ())
            if is_metric(child) and child.dist_sync_on_step
        ]
        self._keep()

    def _keep(self) -> None:
        if not self._is_dummy:
            return
        seen: set[int] = set()
        for child in self._module.modules():
            if not is_metric(child):
                self._undo += _of_module(child, seen)
            elif not child.dist_sync_on_step:
                self._undo.append(_of_metric(child))
        for callback in self._callbacks:
            self._undo += _of_attributes(vars(callback), seen)

    def put_back(self) -> None:
        """Undo the effects of a dummy batch so far. Later effects, of the optimizer's step, stay."""
        for undo in self._undo:
            undo()
        self._undo = []  # a second call must not undo the optimizer's step

    def renew(self) -> None:
        """Undo the effects of a dummy batch so far, before a hook that may save, and its effects from here on."""
        self.put_back()
        self._keep()

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
        if len(self.counts) == 4:
            self.learn(self.counts, self.forward_is_collective)

    def learn(self, counts: list[int | None], always: bool) -> None:
        """Read these `counts`; with `always` the step communicates in any case."""
        known = [count for count in counts if count is not None]
        if len(known) == len(counts):
            start, before, after, end = known
            self.in_step, self.in_hooks = always or after > before, before > start or end > after


@contextmanager
def discarded(module: nn.Module, collector: MetricCollector | None) -> Iterator[None]:
    """Discard the values that the block logs and its updates of the module's torchmetrics."""
    undo = [_of_metric(child) for child in module.modules() if is_metric(child)]
    try:
        with nullcontext() if collector is None else collector.silenced():
            yield
    finally:
        for each in undo:
            each()


class OwnRounds:
    """This rank's batches of its own loader (`count` at most), followed by dummy batches while another rank has more.

    If a rank has no batch at all, every rank ends with its loader. `is_collective`: a forward needs every rank.
    """

    exact_length = None

    def __init__(
        self,
        loader: Shard,
        count: int | None,
        communication: Communication,
        is_collective: bool,
    ) -> None:
        self._loader, self._count, self._is_collective = loader, count, is_collective
        self._communication = communication
        self.real_length: int | None = None
        """The number of batches before the dummy batches. None until known."""
        self.is_empty = False
        """Whether no rank has a batch, once all have looked."""

    def __iter__(self) -> Iterator[Any]:
        exact = self._loader.exact_length
        known = exact if exact is None or self._count is None else min(exact, self._count)
        lengths = collectives.gather_object(known)
        if None in lengths:
            yield from self._until_all_end()
            return
        self._refuse_none(lengths)
        self.is_empty = not any(lengths)
        further = max(lengths) - known if known and all(lengths) else 0  # nothing to repeat on a rank without a batch
        kept = None
        for batch in islice(self._loader, self._count):
            if further:  # it may be the last
                kept = _with_new_containers(batch)
            yield batch
        self.real_length = known
        for _ in range(further):
            yield _with_new_containers(kept)

    def _until_all_end(self) -> Iterator[Any]:
        batches = islice(self._loader, self._count)
        kept, number, exchanges = END, 0, True
        while True:
            batch = next(batches, END)
            if batch is END and self.real_length is None:
                self.real_length = number
            # The first batch shows whether the step communicates.
            exchanges = exchanges and (number < 2 or self._communication.in_step or self._communication.in_hooks)
            if exchanges:
                have = collectives.all_gather(torch.tensor(int(batch is not END)))
                if number == 0:
                    self._refuse_none([int(each) for each in have])
                    exchanges = all(have)
                self.is_empty = number == 0 and not any(have)
                if not any(have):
                    return
            if batch is END and not exchanges:
                return
            if batch is END:
                batch = _with_new_containers(kept)
            elif exchanges:  # it may be the last
                kept = _with_new_containers(batch)
            yield batch
            number += 1

    def _refuse_none(self, batches: list[int]) -> None:
        if self._is_collective and any(batches) and not all(batches):
            raise ValueError(
                f"rank {batches.index(0)} has no batch of its own to evaluate, but under this strategy a forward needs every "
                "rank. Give each rank one, or let the loader be sharded (use_distributed_sampler=True)."
            )


def _with_new_containers(batch: Any) -> Any:
    """Return the same tensors in new mappings, lists and tuples, because a step may remove items from its batch."""

    def leaf(value: Any) -> Any:
        return copy.copy(value) if isinstance(value, MutableMapping) else value  # one that moves itself to a device

    return map_leaves(leaf, batch)


def _of_metric(metric: Metric) -> Undo:
    states, count = metric._copy_state_dict(), metric._update_count

    def restore() -> None:
        for name, value in states.items():
            setattr(metric, name, value)
        metric._update_count, metric._computed = count, None

    return restore


def _taking_nothing(metric: Metric) -> Undo:
    """Let a Metric object that gathers at every step take part without a sample; return a function that ends that.

    It keeps the samples that it gathers from the other ranks, as the Metric objects there do.
    """
    update = metric.__dict__["update"]

    def take_nothing(*args: Any, **kwargs: Any) -> None:
        metric._computed = None  # otherwise compute() would return its cached value and not gather
        metric._update_count += 1

    metric.__dict__["update"] = take_nothing
    return partial(metric.__dict__.__setitem__, "update", update)


def _of_module(module: nn.Module, seen: set[int]) -> list[Undo]:
    if is_collection(module):  # its Metric objects are restored one by one
        return []
    undo: list[Undo] = [
        partial(_put_back_buffer, module, name, buffer, buffer.detach().clone())
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta
    ]
    for name, value in vars(module).items():
        if name not in OF_TORCH and isinstance(value, Tensor) and not value.is_meta and value.is_leaf:
            undo.append(partial(_fill, value, value.detach().clone()))
    return undo + _of_attributes(vars(module), seen, OF_TORCH)


def _of_attributes(attributes: dict[str, Any], seen: set[int], left_out: frozenset[str] = frozenset()) -> list[Undo]:
    """Return functions that restore an object's attributes, and the contents of collections among them.

    An integer that grew by one stays, because it counts batches, as on every rank.
    """
    own = {name: value for name, value in attributes.items() if name not in left_out}

    def restore() -> None:
        for name, value in own.items():
            now = attributes.get(name)
            is_count = type(value) is int and type(now) is int and now == value + 1
            if now is not value and not is_count:
                attributes[name] = value

    return [*(undo for value in own.values() for undo in _of_collection(value, seen)), restore]


def _of_collection(value: Any, seen: set[int]) -> list[Undo]:
    if not isinstance(value, (list, set, deque, MutableMapping)) or id(value) in seen:
        return []
    seen.add(id(value))  # collections may hold one another
    held: Any = dict(value) if isinstance(value, MutableMapping) else list(value)
    inner = [] if isinstance(value, set) else list(held.values()) if isinstance(held, dict) else held

    def restore() -> None:
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(held)

    return [*(undo for each in inner for undo in _of_collection(each, seen)), restore]


def _put_back_buffer(module: nn.Module, name: str, buffer: Tensor, kept: Tensor) -> None:
    now = module._buffers.get(name)
    is_count = not buffer.dim() and not buffer.is_floating_point() and not buffer.is_complex()
    if is_count and now is not None and torch.equal(now, kept + 1):  # such as BatchNorm's num_batches_tracked
        return
    _fill(buffer, kept)
    module._buffers[name] = buffer


def _fill(tensor: Tensor, kept: Tensor) -> None:
    tensor.data.copy_(kept)
