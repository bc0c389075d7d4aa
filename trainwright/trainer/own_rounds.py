"""Own rounds: an evaluation where each rank has a loader of its own, which may end on one rank before another.

A step that communicates waits for all ranks. So a rank whose loader has ended goes on with its last batch, which does not
count, until the others' have ended. Lengths that are known are told once, before the first batch; else the ranks ask one
another at each batch, as long as the step or its hooks communicate.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from itertools import islice
from typing import Any

import torch

from trainwright.data.transfer import map_leaves
from trainwright.distributed import collectives
from trainwright.trainer.stage import Shard
from trainwright.trainer.uneven_round import Communication

END: Any = object()


class OwnRounds:
    """This rank's batches of one loader of its own, and then as many more as another rank has.

    A rank that has no batch at all ends at once, and so do the others at their own ends.

    Args:
        loader: this rank's.
        count: batches of it at most; None for all.
        told: what of a batch communicates, as far as that is known.
        is_collective: whether a forward needs every rank.
    """

    exact_length = None

    def __init__(self, loader: Shard, count: int | None, told: Communication, is_collective: bool) -> None:
        self._loader, self._count, self._told, self._is_collective = loader, count, told, is_collective
        self.real_length: int | None = None
        """How many of the batches count; None while all that have come do."""

    def __iter__(self) -> Iterator[Any]:
        exact = self._loader.exact_length
        known = exact if exact is None or self._count is None else min(exact, self._count)
        lengths = collectives.gather_object(known)
        if None in lengths:
            yield from self._asking()
            return
        self._refuse_none(lengths)
        further = max(lengths) - known if known and all(lengths) else 0
        kept = None
        for batch in islice(self._loader, self._count):
            if further:  # it may be the last
                kept = _built_anew(batch)
            yield batch
        self.real_length = known
        for _ in range(further):
            yield _built_anew(kept)

    def _asking(self) -> Iterator[Any]:
        batches = islice(self._loader, self._count)
        kept, number, asks = END, 0, True
        while True:
            batch = next(batches, END)
            if batch is END and self.real_length is None:
                self.real_length = number
            asks = asks and (number < 2 or self._told.in_step or self._told.in_hooks)
            if asks:
                have = collectives.all_gather(torch.tensor(int(batch is not END)))
                if number == 0:
                    self._refuse_none([int(each) for each in have])
                    asks = all(have)
                if not any(have):
                    return
            if batch is END and not asks:
                return
            if batch is END:
                batch = _built_anew(kept)
            elif asks:  # it may be the last
                kept = _built_anew(batch)
            yield batch
            number += 1

    def _refuse_none(self, batches: list[int]) -> None:
        if self._is_collective and any(batches) and not all(batches):
            raise ValueError(
                f"rank {batches.index(0)} has no batch of its own to evaluate, but under this strategy a forward needs every "
                "rank; give each rank one, or let the loader be shared out (use_distributed_sampler=True)."
            )


def _built_anew(batch: Any) -> Any:
    """Return the batch's tensors in mappings, lists and tuples of its own: a step may take items out of those it is given."""

    def leaf(value: Any) -> Any:
        return copy.copy(value) if isinstance(value, MutableMapping) else value  # one that moves itself to a device

    return map_leaves(leaf, batch)
