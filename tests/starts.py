"""The batches at which a test begins an epoch again: a few informative ones, and all of them among the slow tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

Starts = Callable[..., Iterable[int]]
"""Given the number of batches of an epoch and the boundaries in it, return where to begin."""


def some(length: int, *boundaries: int) -> list[int]:
    """Return the first and the last start, both sides of every boundary, and five random ones."""
    drawn = random.Random(length).choices(range(length + 1), k=5)
    edges = [each + side for each in boundaries for side in (-1, 0, 1)]
    return sorted({each for each in (0, 1, length - 1, length, *edges, *drawn) if 0 <= each <= length})


def every(length: int, *boundaries: int) -> list[int]:
    return list(range(length + 1))


some_or_every = pytest.mark.parametrize("starts", [some, pytest.param(every, marks=pytest.mark.slow)])
