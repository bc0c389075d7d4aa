"""A loader without a length is read one batch ahead. The time of reading must not change a batch's random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from trainwright.data.combined import CombinedLoader, shard
from trainwright.data.loaders import with_last

COUNT = 24


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> list[float]:
        return [index, random.random(), float(np.random.rand()), torch.rand(()).item()]


class Unsized(Sampler[Any]):
    """Batches of four, or single indices, in a random order and without a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(COUNT).tolist()
        for start in range(0, COUNT, self.size):
            yield order[start : start + self.size] if self.size > 1 else order[start]


def mixed(samples: list[list[float]]) -> torch.Tensor:
    """Draws while it collates a batch."""
    return torch.tensor(samples) + torch.rand(()) + random.random()


def unsized(kind: str, num_workers: int = 0) -> DataLoader[Any]:
    if kind == "no batches":
        options = {"batch_size": None, "sampler": Unsized(1), "collate_fn": torch.tensor}
        return DataLoader(Augmented(), num_workers=num_workers, **options)
    return DataLoader(Augmented(), batch_sampler=Unsized(4), collate_fn=mixed, num_workers=num_workers)


def sized() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=4, collate_fn=mixed)


LOADERS: dict[str, Any] = {
    "batches": lambda: unsized("batches"),
    "no batches": lambda: unsized("no batches"),
    "min_size": lambda: CombinedLoader([sized(), unsized("batches")], "min_size"),
    "max_size_cycle": lambda: CombinedLoader([unsized("no batches"), sized()], "max_size_cycle"),
}


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else [plain(each) for each in batch]


def train(loader: Any, start: int = 0, places: Any = (), rank: int = 0, ranks: int = 1) -> tuple[list[Any], list[Any]]:
    """Return an epoch's batches from one on, the training's random numbers with them, and the positions after them."""
    share = shard(loader, rank=rank, world_size=ranks, mode="train")
    share.load_state_dict({"places": places, "sources": []})
    share.set_epoch(5, 1, start)
    had, told = [], []
    for number, (batch, _) in enumerate(with_last(share, start, share.exact_length), start=start + 1):
        had.append((plain(batch), random.random(), float(np.random.rand()), torch.rand(()).item()))
        told.append((share.positions(number), random.getstate(), np.random.get_state(), torch.get_rng_state()))
    share.close()
    return had, told


@pytest.mark.parametrize("kind", list(LOADERS))
def test_an_epoch_is_taken_up_at_any_batch(kind: str) -> None:
    whole, told = train(LOADERS[kind]())
    assert len({str(batch) for batch, *_ in whole}) == len(whole) >= 6
    for start, (places, *states) in list(enumerate(told, start=1))[:-1]:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        rest, _ = train(LOADERS[kind](), start, places)
        assert rest == whole[start:], start


@pytest.mark.parametrize("kind", ["batches", "no batches"])
def test_batches_draw_the_same_as_in_workers(kind: str) -> None:
    alone = [batch for batch, *_ in train(unsized(kind))[0]]
    assert [batch for batch, *_ in train(unsized(kind, num_workers=1))[0]] == alone
    left, right = ([batch for batch, *_ in train(unsized(kind), rank=rank, ranks=2)[0]] for rank in range(2))
    assert left != right
    assert len(left) == len(right) == len(alone) // 2
    share = shard(unsized(kind), rank=0, world_size=1, mode="train")
    assert share.may_read_ahead


def test_a_loader_with_a_length_draws_from_the_training_s_generators() -> None:
    share = shard(sized(), rank=0, world_size=1, mode="train")
    share.set_epoch(5, 1)
    batches = iter(share)
    before = random.getstate()
    next(batches)
    assert random.getstate() != before
    assert not share.may_read_ahead
