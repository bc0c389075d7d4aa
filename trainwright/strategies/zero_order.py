"""ZeRO's order of reduction: one order of parameters on every rank, whatever order a rank's backward reaches them in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.distributed import collectives
from trainwright.strategies.used_parameters import RanksUse

_MEMBER = re.compile(r"^members\.\d+\.")
"""What an engine's module, a `Part`, puts before the names of a user's module."""


class ReductionOrder:
    """Gives gradients to a ZeRO optimizer's buckets in one order; one that arrives early waits for those before it.

    DeepSpeed fills its buckets in the order of arrival and adds the ranks' buckets element by element. That order follows
    from the batch: an LSTM's backward reaches its weights in another order if all sequences have one length.

    The order is that of rank 0's first backward; during that one the parameters made last come first. It is saved, as under
    ddp, so that three or more ranks of a resumed run sum in the order of the saved one.

    What a rank does not use counts as zero, since another rank may have used it. Not in stage 3, whose ranks gather together
    what they use: there `RanksUse` refuses it.
    """

    def __init__(self, zero: Any, named: Iterable[tuple[str, Tensor]], stage: int) -> None:
        groups = zero.fp16_groups if stage == 3 else zero.bit16_groups
        # What else DeepSpeed's own calls give: the number of the group, before stage 3.
        self._group = {each: () if stage == 3 else (number,) for number, group in enumerate(groups) for each in group}
        names = {each: _MEMBER.sub("", name) for name, each in named if each in self._group}
        self._parameters, self._names = list(names), list(names.values())
        self._use = RanksUse("deepspeed_stage_3") if stage == 3 else None
        self._zero = zero
        self._order = self._parameters[::-1]
        self.indices: list[int] = []
        """The parameters' numbers in the order that rank 0's first backward had; none before its end."""
        self._reduce = zero.reduce_independent_p_g_buckets_and_remove_grads
        self._finish = zero.independent_gradient_partition_epilogue
        self._begin = zero.clear_backward_seen_flag
        self._turns: list[ReductionOrder] = [self]
        self._next = 0
        self._arrived: list[Tensor] = []
        self._waiting: set[Tensor] = set()
        zero.reduce_independent_p_g_buckets_and_remove_grads = self.reduce
        zero.independent_gradient_partition_epilogue = self.finish
        zero.clear_backward_seen_flag = self.begin

    def take_turns(self, orders: Sequence[ReductionOrder]) -> None:
        """Set the order of the job's engines: one that a backward reaches earlier waits for those before it."""
        self._turns = list(orders)

    def begin(self) -> None:
        """Drop what a backward that failed has left."""
        self._clear()
        self._begin()

    def reduce(self, parameter: Any, *group: int) -> None:
        """Put a parameter's gradient into a bucket, and those that have waited for it."""
        if not getattr(parameter, "ds_grad_is_ready", True):  # one of several parts of it
            self._reduce(parameter, *group)
            return
        if not self.indices:
            self._arrived.append(parameter)
        self._waiting.add(parameter)
        for order in self._turns:
            if not order._reduce_waiting():
                break

    def _reduce_waiting(self) -> bool:
        """Pass on what has its turn; return whether that was the last."""
        while self._next < len(self._order) and (each := self._order[self._next]) in self._waiting:
            self._waiting.remove(each)
            self._reduce(each, *self._group[each])
            self._next += 1
            if self._next == len(self._order):
                self._send_last()
        return self._next == len(self._order)

    def _reduce_rest(self) -> None:
        """Pass on what waits, and what this backward has not used, if it has reached this engine."""
        if self._next == len(self._order) or not (self._next > 0 or self._waiting):
            return
        for parameter in self._order[self._next :]:
            if parameter in self._waiting or self._fills(parameter):
                self._reduce(parameter, *self._group[parameter])
        self._next = len(self._order)
        self._send_last()

    def _send_last(self) -> None:
        """Send the last bucket now, if the engines after this one wait for it."""
        if len(self._turns) > 1:
            self._zero.reduce_ipg_grads()

    def finish(self) -> None:
        """End a backward: no gradient will come for parameters that have not had one. Collective."""
        has_begun = self._next > 0 or bool(self._waiting)
        if has_begun and self._use is not None:
            came = self._waiting.union(self._order[: self._next])
            self._use.note(self._names, (each in came for each in self._parameters))
        for order in self._turns[: self._turns.index(self) + 1]:
            order._reduce_rest()
        arrived = list(dict.fromkeys([*self._arrived, *self._order])) if not self.indices else []
        self._clear()
        self._finish()
        if arrived:
            numbers = {each: number for number, each in enumerate(self._parameters)}
            found = torch.tensor([numbers[each] for each in arrived], device=arrived[0].device)
            self.replay(collectives.broadcast(found, 0).tolist())

    def replay(self, indices: Sequence[int]) -> None:
        """Use an order from the next backward on; one of other parameters is left out."""
        if sorted(indices) == list(range(len(self._parameters))):
            self.indices = list(indices)
            self._order = [self._parameters[each] for each in indices]

    def compare(self, exchange: collectives.Exchange) -> None:
        """Raise RuntimeError on every rank of stage 3 if the ranks have used different parameters. Collective."""
        if self._use is not None:
            self._use.compare(exchange)

    def _fills(self, parameter: Any) -> bool:
        """Give a parameter that this rank has not used a gradient of zeros; return whether it has one."""
        if not parameter.requires_grad or self._use is not None:
            return False
        if getattr(self._zero, "use_grad_accum_attribute", False):
            parameter.grad_accum = torch.zeros_like(parameter, dtype=self._zero.gradient_accumulation_dtype)
        else:
            parameter.grad = torch.zeros_like(parameter)
        return True

    def _clear(self) -> None:
        self._next = 0
        self._arrived.clear()
        self._waiting.clear()


def take_turns(orders: Sequence[ReductionOrder], stage: int) -> None:
    """Let the job's engines reduce in one order: that made last first, as a backward reaches them.

    Stage 1 reduces in the step, and ranks of stage 3 use the same parameters.
    """
    for each in orders if stage == 2 else ():
        each.take_turns(orders[::-1])
