"""ZeRO's order of reduction: one order of parameters on every rank, whatever order a rank's backward reaches them in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
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

    What a rank does not use counts as zero, since another rank may have used it, even if it has used nothing of this engine's
    itself. Not in stage 3, whose ranks gather together what they use: there `RanksUse` refuses it.
    """

    def __init__(self, zero: Any, named: Iterable[tuple[str, Tensor]], stage: int) -> None:
        groups = zero.fp16_groups if stage == 3 else zero.bit16_groups
        # What else DeepSpeed's own calls give: the number of the group, before stage 3.
        self._group = {each: () if stage == 3 else (number,) for number, group in enumerate(groups) for each in group}
        names = {each: _MEMBER.sub("", name) for name, each in named if each in self._group}
        self._parameters, self._names = list(names), list(names.values())
        self._use = RanksUse("deepspeed_stage_3") if stage == 3 else None
        self._zero, self.stage = zero, stage
        self._order = self._parameters[::-1]
        self.indices: list[int] = []
        """The parameters' numbers in the order that rank 0's first backward had; none before its end."""
        self._reduce = zero.reduce_independent_p_g_buckets_and_remove_grads
        self._finish = zero.independent_gradient_partition_epilogue
        self._begin = zero.clear_backward_seen_flag
        self._turns: list[ReductionOrder] = [self]
        # Stage 1 reduces in the step, which every rank takes.
        self._on_any: Callable[[bool], bool] = (lambda is_here: True) if stage == 1 else bool
        self._is_reached: bool | None = None
        """Whether this backward reaches the engine on any rank; None until that is known."""
        self.has_ended = False
        """Whether DeepSpeed has ended the latest backward, as it does where one has reached the engine."""
        self._next = 0
        self._arrived: list[Tensor] = []
        self._waiting: set[Tensor] = set()
        zero.reduce_independent_p_g_buckets_and_remove_grads = self.reduce
        zero.independent_gradient_partition_epilogue = self.finish
        zero.clear_backward_seen_flag = self.begin

    def take_turns(self, orders: Sequence[ReductionOrder], on_any: Callable[[bool], bool]) -> None:
        """Set the order of the job's engines: one that a backward reaches earlier waits for those before it.

        `on_any` tells whether a backward reaches an engine on any rank. With one engine each does.
        """
        self._turns = list(orders)
        self._on_any = on_any if len(orders) > 1 else lambda is_here: True

    def begin(self) -> None:
        """Drop what a backward that failed has left, here and in DeepSpeed's buckets."""
        self._clear()
        if self.stage == 2 and not self.has_ended:
            for bucket in self._zero.ipg_buckets.values():
                bucket.clear()
            self._zero.extra_large_param_to_reduce.clear()
            self._zero.grads_in_partition = None
            self._zero.params_already_reduced = [False] * len(self._zero.params_already_reduced)
        elif self.stage == 3 and not self.has_ended:
            for bucket in self._zero.ipg_buckets.values():
                bucket.clear_params()
        self.has_ended = False
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
            self._agree()  # before anything is sent: the ranks that wait for the answer are to send their part
            self._waiting.remove(each)
            self._reduce(each, *self._group[each])
            self._next += 1
            if self._next == len(self._order):
                self._send_last()
        return self._next == len(self._order)

    def _has_begun(self) -> bool:
        return self._next > 0 or bool(self._waiting)

    def _agree(self) -> bool:
        """Return whether this backward reaches the engine on any rank. Each rank asks once, and all in the same order."""
        if self._is_reached is None:
            self._is_reached = self._on_any(self._has_begun())
        return self._is_reached

    def _complete(self) -> None:
        """Pass on what waits, and what this backward has not used, if it reaches the engine on any rank. Collective."""
        if self._agree():
            self._reduce_rest()
            self._fix_order()

    def _fix_order(self) -> None:
        """Use the order of rank 0's first backward from now on."""
        if self._order and not self.indices:
            numbers = {each: number for number, each in enumerate(self._parameters)}
            arrived = dict.fromkeys([*self._arrived, *self._order])
            found = torch.tensor([numbers[each] for each in arrived], device=self._order[0].device)
            self.replay(collectives.broadcast(found, 0).tolist())

    def _reduce_rest(self) -> None:
        if self._next == len(self._order):
            return
        if not self._has_begun():
            self._zero.setup_buckets()  # which the first gradient does otherwise
        for parameter in self._order[self._next :]:
            if parameter in self._waiting or self._fills(parameter):
                self._reduce(parameter, *self._group[parameter])
        self._next = len(self._order)
        self._send_last()

    def _send_last(self) -> None:
        """Send the last bucket now, if the engines after this one wait for it, and the order before they send theirs."""
        if len(self._turns) > 1:
            self._zero.reduce_ipg_grads()
            self._fix_order()

    def finish(self) -> None:
        """End a backward: no gradient will come for parameters that have not had one. Collective."""
        if self._use is not None and self._has_begun():
            came = self._waiting.union(self._order[: self._next])
            self._use.note(self._names, (each in came for each in self._parameters))
        for order in self._turns[: self._turns.index(self) + 1]:
            if order is self or not order.has_ended:
                order._complete()
        self._clear()
        self.has_ended = True
        self._finish()

    def awaits_end(self) -> bool:
        """Return whether the backward that ends has reached this engine on other ranks alone, so nothing has ended it here.

        Collective: ask it on every rank after each backward, engine by engine.
        """
        if self.has_ended or self.stage != 2:
            return False
        for order in self._turns[: self._turns.index(self) + 1]:
            if not order.has_ended:
                order._complete()
        return self._agree()

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
        self._is_reached = None
        self._next = 0
        self._arrived.clear()
        self._waiting.clear()


def take_turns(orders: Sequence[ReductionOrder], stage: int, on_any: Callable[[bool], bool]) -> None:
    """Let the job's engines reduce in one order: that made last first, as a backward reaches them.

    Stage 1 reduces in the step, and ranks of stage 3 use the same parameters.
    """
    for each in orders if stage == 2 else ():
        each.take_turns(orders[::-1], on_any)
