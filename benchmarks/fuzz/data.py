"""The data sets of the random tests: small, distinguishable by their values, and short enough for a script."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler


class Samples(Dataset):
    def __init__(self, count: int, augment: bool = False) -> None:
        self.count, self.augment = count, augment

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(4.0) * 0.1 + index * 0.05
        if self.augment:
            x = x + 0.1 * (torch.rand(4) + random.random() + float(numpy.random.rand()))
        return x, torch.tensor(float(index % 3))


class Stream(IterableDataset):
    def __init__(self, count: int, shuffle: bool = False) -> None:
        self.count, self.shuffle = count, shuffle

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in torch.randperm(self.count).tolist() if self.shuffle else range(self.count):
            yield torch.arange(4.0) * 0.1 + index * 0.05, torch.tensor(float(index % 3))


class Endless(IterableDataset):
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            self.at += 1
            yield torch.arange(4.0) * 0.1 + self.at % 31 * 0.05, torch.tensor(float(self.at % 3))

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Shuffled(Sampler):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.count).tolist())
