"""Proportions: how a round of several loaders is cut, so that one weight of a rank's loss is right for each of them.

A loss is weighed as a whole. In a round in which one loader has fewer samples than in a full one, a rank's part of each
loader has to be the same share of that loader's samples; where the sizes allow none, no weight is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from trainwright.data.stream_shard import even_sizes


def in_proportion(samples: list[int], ranks: int, batch_sizes: list[int]) -> list[list[int]]:
    """Return, for each loader, how many of its samples in a round each rank gets: the same share of each loader's.

    No rank gets more samples in all than a full batch of each loader has. Where the sizes allow no such cut, each loader is
    shared out by itself, over as many ranks as may be.
    """
    units = gcd(*samples)
    in_unit = [each // units for each in samples]
    most = sum(batch_sizes) // sum(in_unit)
    if most and most * ranks >= units:
        counts = even_sizes(units, ranks, most, least=1 if min(in_unit) > 1 else 2)
        return [[count * size for count in counts] for size in in_unit]
    return [even_sizes(each, ranks, size, least=1) for each, size in zip(samples, batch_sizes, strict=True)]


def are_proportional(parts: Sequence[list[int] | None]) -> bool:
    """Return whether each rank has the same share of every loader's samples; None stands for equal parts."""
    ranks = max(len(each) for each in parts if each is not None)
    whole = [each or [1] * ranks for each in parts]
    first, total = whole[0], sum(whole[0])
    return all(
        one * sum(other) == another * total for other in whole for one, another in zip(first, other, strict=True)
    )
