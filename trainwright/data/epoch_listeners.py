"""Epoch listeners: the parts of a user's loader that have a `set_epoch`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, StackDataset, Subset


def set_epoch_of_parts(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of the loader, its dataset, its samplers and what they contain; for copies in workers see workers.py."""
    parts = [loader, getattr(loader, "dataset", None)]
    for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        while sampler is not None:
            parts.append(sampler)
            sampler = getattr(sampler, "sampler", None)
    for each in {id(part): part for part in parts}.values():
        set_epoch_of(each, epoch)


def set_epoch_of(listener: Any, epoch: int) -> None:
    """Call `set_epoch` of an object, if it has it, and of the datasets that one of torch's own contains."""
    if callable(set_epoch := getattr(listener, "set_epoch", None)) and not is_split_after_shuffle(listener):
        set_epoch(epoch)
    within: Any = ()
    if isinstance(listener, Subset):  # random_split's, too
        within = (listener.dataset,)
    elif isinstance(listener, (ConcatDataset, ChainDataset, StackDataset)):
        within = listener.datasets
    within = within.values() if isinstance(within, Mapping) else within
    if isinstance(within, Collection):  # not a ChainDataset's generator of datasets, which only reading may consume
        for each in within:
            set_epoch_of(each, epoch)


def is_split_after_shuffle(stream: Any) -> bool:
    """Return whether a stream of the package datasets takes or skips items of a shuffled one, which an epoch would change."""
    names, part = "", getattr(stream, "_ex_iterable", None)
    while part is not None:
        names, part = names + type(part).__name__, getattr(part, "ex_iterable", None)
    return re.search("(Take|Skip)Examples.*BufferShuffled", names) is not None
