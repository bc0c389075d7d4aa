"""ZeRO's order of reduction: one order of parameters on every rank, whatever order a rank's backward reaches them in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class ReductionOrder:
    """Gives gradients to a ZeRO optimizer's buckets in a fixed order; one that arrives early waits for those before it.

    DeepSpeed fills its buckets in the order of arrival and adds the ranks' buckets element by element. That order follows
    from the batch: an LSTM's backward reaches its weights in another order if all sequences have one length.
    """

    def __init__(self, zero: Any, parameters: Iterable[Tensor], stage: int) -> None:
        own = {each for group in (zero.fp16_groups if stage == 3 else zero.bit16_groups) for each in group}
        # Those made last come first, about as a backward reaches them.
        self._order = [each for each in reversed(list(parameters)) if each in own]
        self._reduce = zero.reduce_independent_p_g_buckets_and_remove_grads
        self._finish = zero.independent_gradient_partition_epilogue
        self._begin = zero.clear_backward_seen_flag
        self._next = 0
        self._waiting: dict[Tensor, tuple[Any, ...]] = {}
        zero.reduce_independent_p_g_buckets_and_remove_grads = self.reduce
        zero.independent_gradient_partition_epilogue = self.finish
        zero.clear_backward_seen_flag = self.begin

    def begin(self) -> None:
        """Drop what a backward that failed has left."""
        self._clear()
        self._begin()

    def reduce(self, parameter: Any, *group: int) -> None:
        """Put a parameter's gradient into a bucket, and those that have waited for it."""
        if not getattr(parameter, "ds_grad_is_ready", True):  # one of several parts of it
            self._reduce(parameter, *group)
            return
        self._waiting[parameter] = group
        while self._next < len(self._order) and (each := self._order[self._next]) in self._waiting:
            self._reduce(each, *self._waiting.pop(each))
            self._next += 1

    def finish(self) -> None:
        """End a backward: no gradient will come for parameters that have not had one."""
        for parameter in self._order[self._next :] if self._waiting else ():
            if parameter in self._waiting:
                self._reduce(parameter, *self._waiting[parameter])
        self._clear()
        self._finish()

    def _clear(self) -> None:
        self._next = 0
        self._waiting.clear()
