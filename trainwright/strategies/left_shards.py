"""Left shards: which optimizers a strategy has left with this rank's part of their state, for the next fit with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer


class Left(NamedTuple):
    """The strategy's name, and the range (start, numel) of each parameter that this rank has the state of, if it has parts."""

    strategy: str
    ranges: Mapping[Tensor, tuple[int, int]]


LEFT: WeakKeyDictionary[Optimizer, Left] = WeakKeyDictionary()


def refuse_left(optimizers: Sequence[Optimizer], strategy: str) -> None:
    """Raise ValueError for an optimizer whose state another strategy has divided among the ranks."""
    for optimizer in optimizers:
        left = LEFT.get(optimizer)
        if left is not None and left.strategy != strategy:
            raise divided(optimizer, left.strategy, f"strategy={strategy!r} needs other parts")


def divided(optimizer: Optimizer, strategy: str, why: str) -> ValueError:
    """Return the error about an optimizer whose state was divided in another way."""
    return ValueError(
        f"this {type(optimizer).__name__} was prepared before, under strategy={strategy!r}, which has left a part of its "
        f"state on each rank, and {why}. Make a new optimizer for each fit, in configure_optimizers; to continue with the "
        "state, save a checkpoint and resume from it."
    )
