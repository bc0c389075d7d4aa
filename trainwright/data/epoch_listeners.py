"""Epoch listeners: the parts of a user's loader that want to be told which epoch begins, by their `set_epoch`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, StackDataset, Subset


def set_epoch_of_parts(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of the loader, its dataset, its sampler and its batch sampler with what lies within, where they have it.

    That reaches this process's copies; those of workers are told by what they fetch (workers.py).
    """
    told: set[int] = set()
    for each in _parts(loader):
        if id(each) not in told:
            told.add(id(each))
            set_epoch_of(each, epoch)


def set_epoch_of(listener: Any, epoch: int) -> None:
    """Call `set_epoch` of one object, if it has it, and of the datasets that one of torch's own is made of."""
    if callable(set_epoch := getattr(listener, "set_epoch", None)):
        set_epoch(epoch)
    for each in _within(listener):
        set_epoch_of(each, epoch)


def _within(dataset: Any) -> Iterable[Any]:
    if isinstance(dataset, Subset):  # random_split's, too
        return (dataset.dataset,)
    if isinstance(dataset, (ConcatDataset, ChainDataset, StackDataset)):
        held: Any = dataset.datasets
        # A generator of datasets, which a ChainDataset may hold, is the reading's.
        return held.values() if isinstance(held, Mapping) else held if isinstance(held, (list, tuple)) else ()
    return ()


def _parts(loader: Any) -> Iterator[Any]:
    yield loader
    yield getattr(loader, "dataset", None)
    for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        while sampler is not None:
            yield sampler
            sampler = getattr(sampler, "sampler", None)
