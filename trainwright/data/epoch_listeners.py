"""Epoch listeners: the parts of a user's loader that want to be told which epoch begins, by their `set_epoch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def tell_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of the loader, its dataset, its sampler and its batch sampler with what lies within, where they have it.

    That reaches this process's copies; those of workers are told by what they fetch (workers.py).
    """
    told: set[int] = set()
    for each in _parts(loader):
        if id(each) not in told:
            told.add(id(each))
            tell(each, epoch)


def tell(listener: Any, epoch: int) -> None:
    """Call `set_epoch` of one object, if it has it."""
    if callable(set_epoch := getattr(listener, "set_epoch", None)):
        set_epoch(epoch)


def _parts(loader: Any) -> Iterator[Any]:
    yield loader
    yield getattr(loader, "dataset", None)
    for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        while sampler is not None:
            yield sampler
            sampler = getattr(sampler, "sampler", None)
