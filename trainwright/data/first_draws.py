"""First draws: compares the first indices or batches of a sharded loader between ranks, without a collective.

They differ if a sampler or a stream already divides the data by rank, or if a split or a shuffle has no seed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.data import Subset

from trainwright.data.batch_stream import BatchStream
from trainwright.data.source_state import fingerprint, matches
from trainwright.data.stateful_iterable import StatefulBatch
from trainwright.distributed.ranks import Ranks
from trainwright.errors import a_type_of
from trainwright.rank_zero import warn

FEW = 16
"""Indices to compare."""


def compare_first_draws(loader: Any, ranks: Ranks, stage: str) -> None:
    """Compare the ranks' first draws from a sharded loader, or from the parts of a combination. Collective: call on every rank.

    The first batches of a stream are compared when they are read. A difference between them leads to a warning.

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
            if isinstance(dataset := part.loader.dataset, Subset):
                draws["the indices of the Subset (random_split)"] = fingerprint(list(dataset.indices[:FEW]))
    first, *others = ranks.exchange(draws, f"the comparison of the {stage} data")
    for rank, other in enumerate(others, start=1):
        for name in sorted(first.keys() & other.keys()):
            if not matches(first[name], other[name]):
                raise ValueError(_difference(stage, f"rank 0 and rank {rank}", name))


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
