"""Fetching: a DataLoader's batches in this process, for no more than its dataset and its collate function take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import getitem
from typing import Any, TypeGuard

from torch.autograd import profiler
from torch.autograd.profiler import record_function
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

REGION = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
"""What torch's profiler calls the fetch of a batch, so that its tables show it under the name that its users know."""


def is_fetched_here(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    """Return whether `fetched` gives what iterating this loader over a map-style dataset would."""
    # Torch's own iterator takes 5 to 10 us a batch for what such a loader does not use: a profiler's region, workers, pinning.
    return (
        isinstance(loader, DataLoader)
        and loader.num_workers == 0
        and not loader.pin_memory
        and not loader.timeout
        and type(loader)._get_iterator is DataLoader._get_iterator
        and not isinstance(loader.dataset, (IterDataPipe, MapDataPipe))
    )


def fetched(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator over the batches; the sampler's iteration begins now."""
    collate: Callable[[Any], Any] = loader.collate_fn
    dataset: Any = loader.dataset
    read = getattr(dataset, "__getitems__", None) if loader._auto_collation else partial(getitem, dataset)

    def fetch(wanted: Any, region: record_function | None = None) -> Any:
        if region is None and profiler._is_profiler_enabled:
            with record_function(REGION) as region:
                return fetch(wanted, region)
        if read:
            return collate(read(wanted))
        # Not list(map(...)), which would take a StopIteration of the dataset for the end of the batch and lose samples.
        return collate([dataset[index] for index in wanted])

    return map(fetch, loader._index_sampler)
