"""First draws: compares the first indices or batches of a sharded loader between ranks, without a collective.

They differ if a sampler or a stream already divides the data by rank, or if a split or a shuffle has no seed. A dataset's
items may be augmented at random, so its indices and the collections in its attributes are compared instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.utils.data import Dataset, Subset

from trainwright.data.batch_stream import BatchStream
from trainwright.data.fingerprint import fingerprint, matches
from trainwright.data.stateful_iterable import StatefulBatch
from trainwright.distributed.ranks import Ranks
from trainwright.errors import a_type_of
from trainwright.rank_zero import rank_zero_warn, warn

FEW = 16  # items of each collection
COMPARED: WeakSet[Any] = WeakSet()
"""Datasets that were already compared. Reading a dataset may fill a cache that differs by rank."""


def compare_first_draws(loader: Any, ranks: Ranks, stage: str) -> None:
    """Compare the ranks' first draws from a sharded loader, or from the parts of a combination. Collective: call on every rank.

    A difference in a dataset's collections leads to a warning. The first batches of a stream are compared when they are
    read.

    Raises:
        ValueError: the ranks' samplers draw different indices, or their subsets differ.
    """
    if ranks.world_size == 1:
        return
    draws: dict[str, list[Any]] = {}
    for part in getattr(loader, "parts", [loader]):
        if isinstance(part.shard, BatchStream) and part.is_sharded:
            part.shard.compare_first(partial(_compared, ranks.subchannel("first batches"), stage, part.loader))
        elif part.is_sharded:
            sampler = a_type_of(getattr(part.stream.source, "sampler", part.stream.source))
            draws[f"the first indices of {sampler}"] = fingerprint(part.stream.first_indices(FEW))
            with suppress(Exception):  # training may never read the attribute that fails here
                draws |= _contents(part.loader.dataset, type(part.loader.dataset).__name__)
    first, *others = ranks.exchange(draws, f"the comparison of the {stage} data")
    for rank, other in enumerate(others, start=1):
        for name in sorted(first.keys() & other.keys()):
            if not matches(first[name], other[name]):
                text = _difference(stage, f"rank 0 and rank {rank}", name)
                if name.startswith("the "):
                    raise ValueError(text)
                rank_zero_warn(text, stacklevel=2)
                return


def _contents(value: Any, name: str, depth: int = 0, size: int | None = None) -> Iterator[tuple[str, list[Any]]]:
    """Yield a name and a few values for every collection of `size` items in a dataset's attributes, or in a dataset within."""
    if isinstance(value, Subset):
        yield f"the indices of {name} (random_split)", fingerprint(list(value.indices[:FEW]))
        yield from _contents(value.dataset, f"{name}.dataset", depth + 1)
    elif hasattr(value, "with_format") and hasattr(
        value, "num_rows"
    ):  # of the package datasets, without its transforms
        yield name, fingerprint(value.with_format("arrow")[:2].to_pydict())
    elif hasattr(value, "iloc"):  # pandas
        yield name, fingerprint(value.iloc[:FEW].to_dict("list"))
    elif isinstance(value, (list, tuple)) or getattr(value, "ndim", None):
        if size in (None, len(value), *(len(item) for item in value[:FEW] if isinstance(item, Tensor) and item.ndim)):
            yield name, fingerprint([len(value), *value[:FEW]])
    elif ((isinstance(value, Dataset) and depth < 4) or not depth) and value not in COMPARED:
        COMPARED.add(value)
        for attribute, content in vars(value).items():
            yield from _contents(content, f"{name}.{attribute}", depth + 1, len(value))


def _compared(ranks: Ranks, stage: str, loader: Any, batch: Any) -> Any:
    """Return a batch, after a warning if another rank has read a different first batch."""
    print_here = fingerprint(batch.batch if isinstance(batch, StatefulBatch) else batch)
    for rank, other in enumerate(ranks.posted(print_here)):
        if other is not None and not matches(print_here, other):
            between, first = f"rank {ranks.rank} and rank {rank}", f"the first batch of {a_type_of(loader.dataset)}"
            warn(_difference(stage, between, first), stacklevel=2)
            break
    return batch


def _difference(stage: str, ranks: str, name: str) -> str:
    return (
        f"the {stage} data differs between {ranks}: {name}. Every rank takes its part of the same data, so here samples "
        "may be skipped, or mixed with samples of another split. If the data is already divided by rank, set "
        "use_distributed_sampler=False (or do not pass its loader to prepare). Otherwise shuffle and split with the same "
        "seed on every rank: call seed_everything, or pass a seeded generator."
    )
