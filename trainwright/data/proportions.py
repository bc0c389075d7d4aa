"""Proportions: how to split a round of several loaders so that one weight of a rank's loss is right for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from trainwright.data.stream_shard import even_sizes


def in_proportion(samples: list[int], ranks: int, batch_sizes: list[int]) -> list[list[int]]:
    """Return, for each loader, the samples of a round per rank, in the same proportion for all loaders.

    No rank gets more samples in all than a full batch of each loader has. If the sizes allow no such split, each loader is
    split by itself, over as many ranks as possible.
    """
    # A unit is the smallest part of the round that has all loaders in the round's proportion.
    units = gcd(*samples)
    in_unit = [each // units for each in samples]
    most = sum(batch_sizes) // sum(in_unit)
    if most and most * ranks >= units:
        counts = even_sizes(units, ranks, most, least=1 if min(in_unit) > 1 else 2)
        return [[count * size for count in counts] for size in in_unit]
    return [even_sizes(each, ranks, size, least=1) for each, size in zip(samples, batch_sizes, strict=True)]


def are_proportional(parts: Sequence[list[int] | None]) -> bool:
    """Return whether each rank has the same proportion of every loader's samples; None means equal parts."""
    ranks = max(len(each) for each in parts if each is not None)
    first, *others = (each or [1] * ranks for each in parts)
    return all([one * sum(other) for one in first] == [one * sum(first) for one in other] for other in others)
