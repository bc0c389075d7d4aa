"""Epoch listeners: the parts of a user's loader that have a `set_epoch`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, StackDataset, Subset


def set_epoch_of_parts(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of the loader, its dataset and its samplers, and of what they contain, if they have it.

    That reaches the copies in this process; those in workers get the epoch with what they fetch (workers.py).
    """
    for each in {id(part): part for part in _parts(loader)}.values():
        set_epoch_of(each, epoch)


def set_epoch_of(listener: Any, epoch: int) -> None:
    """Call `set_epoch` of an object, if it has it, and of the datasets that one of torch's own contains."""
    if callable(set_epoch := getattr(listener, "set_epoch", None)):
        set_epoch(epoch)
    for each in _within(listener):
        set_epoch_of(each, epoch)


def _within(dataset: Any) -> Iterable[Any]:
    if isinstance(dataset, Subset):  # random_split's, too
        return (dataset.dataset,)
    if isinstance(dataset, (ConcatDataset, ChainDataset, StackDataset)):
        held: Any = dataset.datasets
        # A ChainDataset may hold a generator of datasets, which only reading may consume.
        return held.values() if isinstance(held, Mapping) else held if isinstance(held, (list, tuple)) else ()
    return ()


def _parts(loader: Any) -> Iterator[Any]:
    yield loader
    yield getattr(loader, "dataset", None)
    for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        while sampler is not None:
            yield sampler
            sampler = getattr(sampler, "sampler", None)
