"""ZeRO's order of reduction: the same on every rank, although backwards reach parameters in different orders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.distributed import collectives
from trainwright.strategies.used_parameters import RanksUse
from trainwright.strategies.zero import vendor

_MEMBER = re.compile(r"^members\.\d+\.")
"""The prefix of an engine's module, a `Part`, before the names of a user's module."""


class ReductionOrder:
    """Passes gradients to a ZeRO optimizer's buckets in one order. An early gradient waits for the gradients before it.

    DeepSpeed fills its buckets in the order of arrival and adds the ranks' buckets element by element. That order follows
    from the batch: an LSTM's backward reaches its weights in another order if all sequences have one length.

    Rank 0's first backward sets the order. During this backward the parameters made last come first. The order is saved, as
    under ddp, so that three or more ranks of a resumed run sum in the order of the saved run.

    A parameter that a rank does not use counts as zero, because another rank may have used it. In stage 3, whose ranks gather
    together, `RanksUse` rejects it.
    """

    def __init__(self, zero: Any, named: Iterable[tuple[str, Tensor]], stage: int) -> None:
        groups = vendor.trained_groups(zero, stage)
        # The second argument in DeepSpeed's calls before stage 3: the number of the group.
        self._group = {each: () if stage == 3 else (number,) for number, group in enumerate(groups) for each in group}
        names = {each: _MEMBER.sub("", name) for name, each in named if each in self._group}
        self._parameters, self._names = list(names), list(names.values())
        self._use = RanksUse("deepspeed_stage_3") if stage == 3 else None
        self._zero, self.stage = zero, stage
        self._order = self._parameters[::-1]
        self.indices: list[int] = []
        """The parameters' numbers in the order of rank 0's first backward, empty before its end."""
        self._reduce, self._finish = vendor.replace_reduction(zero, self.reduce, self.finish)
        self.num_ended = 0
        """How many backwards DeepSpeed has ended, which it does if one has reached the engine."""
        self._next = 0
        self._arrived: list[Tensor] = []
        self._waiting: set[Tensor] = set()

    def reduce(self, parameter: Any, *group: int) -> None:
        """Put a parameter's gradient into a bucket, and the gradients that have waited for it."""
        if not getattr(parameter, "ds_grad_is_ready", True):  # one of several parts of it
            self._reduce(parameter, *group)
            return
        if not self.indices:
            self._arrived.append(parameter)
        self._waiting.add(parameter)
        while self._next < len(self._order) and (each := self._order[self._next]) in self._waiting:
            self._waiting.remove(each)
            self._reduce(each, *self._group[each])
            self._next += 1

    def finish(self) -> None:
        """End a backward, after which no gradient will come for the other parameters. Collective."""
        has_begun = self._next > 0 or bool(self._waiting)
        if self._use is not None and has_begun:
            came = self._waiting.union(self._order[: self._next])
            self._use.note(self._names, (each in came for each in self._parameters))
        if self._order and not has_begun:
            self._zero.setup_buckets()  # as the first gradient of a backward does
        for parameter in self._order[self._next :]:
            if parameter not in self._waiting:
                if not parameter.requires_grad or self._use is not None:
                    continue
                vendor.fill_gradient(self._zero, parameter)  # another rank may have used it
            self._reduce(parameter, *self._group[parameter])
        if self._order and not self.indices:
            self._fix_order()
        self._next = 0
        self._arrived.clear()
        self._waiting.clear()
        self.num_ended += 1
        self._finish()

    def _fix_order(self) -> None:
        """Use the order of rank 0's first backward from now on."""
        numbers = {each: number for number, each in enumerate(self._parameters)}
        arrived = dict.fromkeys([*self._arrived, *self._order])
        found = torch.tensor([numbers[each] for each in arrived], device=self._order[0].device)
        self.replay(collectives.broadcast(found, 0).tolist())

    def replay(self, indices: Sequence[int]) -> None:
        """Use an order from the next backward on, unless it is an order of other parameters."""
        if sorted(indices) == list(range(len(self._parameters))):
            self.indices = list(indices)
            self._order = [self._parameters[each] for each in indices]

    def compare(self, exchange: collectives.Exchange) -> None:
        """Raise RuntimeError on every rank of stage 3 if the ranks have used different parameters. Collective."""
        if self._use is not None:
            self._use.compare(exchange)
