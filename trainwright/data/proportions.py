"""Proportions: how to split a round of several loaders so that one weight of a rank's loss is right for each of them.

A loss is weighted as a whole. If a loader has fewer samples than in a full round, a rank has to get the same proportion of
every loader's samples; if the sizes do not allow that, no weight is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from trainwright.data.stream_shard import even_sizes


def in_proportion(samples: list[int], ranks: int, batch_sizes: list[int]) -> list[list[int]]:
    """Return, for each loader, the samples of a round per rank, in the same proportion for all loaders.

    No rank gets more samples in all than a full batch of each loader has. If the sizes allow no such split, each loader is
    split by itself, over as many ranks as possible.
    """
    units = gcd(*samples)
    in_unit = [each // units for each in samples]
    most = sum(batch_sizes) // sum(in_unit)
    if most and most * ranks >= units:
        counts = even_sizes(units, ranks, most, least=1 if min(in_unit) > 1 else 2)
        return [[count * size for count in counts] for size in in_unit]
    return [even_sizes(each, ranks, size, least=1) for each, size in zip(samples, batch_sizes, strict=True)]


def are_proportional(parts: Sequence[list[int] | None]) -> bool:
    """Return whether each rank has the same proportion of every loader's samples; None stands for equal parts."""
    ranks = max(len(each) for each in parts if each is not None)
    whole = [each or [1] * ranks for each in parts]
    first, total = whole[0], sum(whole[0])
    return all(
        one * sum(other) == another * total for other in whole for one, another in zip(first, other, strict=True)
    )
