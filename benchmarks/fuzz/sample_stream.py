"""An iterable data set over the samples of a map-style one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


class SampleStream(IterableDataset[Any]):
    """The samples of a data set in turn."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter([self.data[index] for index in range(len(self.data))])
