"""A run that resumes within an epoch in a different order prints one warning; no other run does."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SubsetRandomSampler, TensorDataset

from trainwright.checkpoint.codec import decode, encode
from trainwright.data.combined import CombinedLoader, shard
from trainwright.data.fingerprint import OrderDigest

COUNT = 24


class GoesOn(Sampler[int]):
    """Has an order that no seed of ours affects, and begins every pass at another place in it."""

    def __init__(self, run: int, count: int = COUNT) -> None:
        self.order = random.Random(run).sample(range(count), count)
        self.passes = 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(self.order[self.passes :] + self.order[: self.passes])


class Groups(Sampler[list[int]]):
    """Batches of uneven sizes."""

    def __init__(self, run: int) -> None:
        self.inner = GoesOn(run)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.inner)
        while order:
            size = 1 + len(order) % 3
            yield order[:size]
            order = order[size:]


def loader(sampler: Any, count: int = COUNT, size: int = 2) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(count))
    if isinstance(sampler, Groups):
        return DataLoader(data, batch_sampler=sampler)
    return DataLoader(data, sampler=sampler, batch_size=size)


def places(make: Any, ranks: int, batches: int, epoch: int = 1) -> list[Any]:
    """Return the position after some batches, which is the same on every rank."""
    told = []
    for rank in range(ranks):
        share = shard(make(), rank=rank, world_size=ranks, mode="train")
        share.set_epoch(3, epoch)
        assert sum(1 for _ in islice(share, batches + 1)) == batches + 1, "read further than it is consumed"
        told.append(share.positions(batches))
    assert all(each == told[0] for each in told)
    return decode(*encode(told[0]))


def warned(make: Any, ranks: int, at: Any, batches: int, epoch: int = 1) -> list[str]:
    """Return the warnings of a run that resumes at a position and trains to the end of the next epoch."""
    share = shard(make(), rank=0, world_size=ranks, mode="train")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        share.load_state_dict({"places": at, "sources": []})
        share.set_epoch(3, epoch, batches)
        list(share)
        share.set_epoch(3, epoch + 1)
        list(share)
    return [str(each.message) for each in caught]


def first_run() -> Any:
    return loader(GoesOn(1))


def second_run() -> Any:
    return loader(GoesOn(2))


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_order_is_told_once(ranks: int) -> None:
    at = places(first_run, ranks, 2)
    (told,) = warned(second_run, ranks, at, 2)
    assert told == (
        "the checkpoint was saved within an epoch of a GoesOn of 24 samples that now draws a different order. In the rest of "
        "this epoch samples may come twice or not at all. Draw the order in its __iter__, from a generator in an attribute of "
        "the sampler or from torch's global generator, which are seeded for every epoch. Or resume from a checkpoint at an "
        "epoch's end."
    )
    at = places(lambda: loader(Groups(1)), ranks, 2)
    assert len(warned(lambda: loader(Groups(2)), ranks, at, 2)) == 1, "without a length"


def test_a_sampler_with_state_across_epochs_causes_a_warning() -> None:
    """The saved run was in the sampler's second pass, and the resumed run draws its first pass."""
    sampler = GoesOn(1)
    share = shard(loader(sampler), rank=0, world_size=1, mode="train")
    for epoch in range(2):
        share.set_epoch(3, epoch)
        list(share)
    at = share.positions(5)
    sampler.passes = 0
    assert len(warned(lambda: loader(sampler), 1, at, 5)) == 1
    sampler.passes = 1
    assert warned(lambda: loader(sampler), 1, at, 5) == []


SAME = {
    "its own": first_run,
    "part": lambda: loader(SubsetRandomSampler(range(COUNT))),
    "groups": lambda: loader(Groups(1)),
    "arrays": lambda: DataLoader(
        TensorDataset(torch.arange(COUNT)), batch_sampler=list(np.arange(COUNT).reshape(-1, 2))
    ),
    "stock": lambda: loader(RandomSampler(range(COUNT))),
    "no batches": lambda: DataLoader(range(COUNT), batch_size=None, sampler=SubsetRandomSampler(range(COUNT))),
}


@pytest.mark.parametrize("kind", list(SAME))
def test_the_same_order_is_not_told_of(kind: str) -> None:
    for before, after in ((1, 1), (2, 2), (2, 1), (1, 3)):
        at = places(SAME[kind], before, 3)
        assert bool(at[0]["digest"]) == (kind != "stock")
        assert warned(SAME[kind], after, at, 3) == [], (before, after)


def test_what_cannot_be_compared_is_not_told_of() -> None:
    at = places(first_run, 1, 3)
    older = [{name: value for name, value in at[0].items() if name != "digest"}]
    assert warned(second_run, 1, older, 3) == []
    assert warned(lambda: loader(GoesOn(2), size=3), 1, at, 3) == [], "with another batch size the items differ"
    assert warned(second_run, 1, places(first_run, 1, 0), 0) == [], "nothing is consumed"


def test_one_reason_causes_a_single_warning() -> None:
    at = places(first_run, 1, 3)
    (told,) = warned(lambda: loader(GoesOn(2, 20), 20), 1, at, 3)
    assert "of a GoesOn of 24 samples, and the run resumes with a GoesOn of 20 samples" in told


def test_only_items_of_the_latest_pass_are_compared() -> None:
    def both(sampler: Any) -> CombinedLoader:
        return CombinedLoader([DataLoader(TensorDataset(torch.arange(60))), loader(sampler)], "max_size_cycle")

    fixed = GoesOn(1)
    at = places(lambda: both(fixed), 1, 29, epoch=0)
    assert (at[1]["passes"], at[1]["items"]) == (2, 5)
    fixed.passes = 2
    assert warned(lambda: both(fixed), 1, at, 29, epoch=0) == []
    fixed.passes = 1
    assert len(warned(lambda: both(fixed), 1, at, 29, epoch=0)) == 1


@pytest.mark.parametrize(
    ("items", "is_told"),
    [
        ([[1, 2], [3]], True),
        ([["a", "b"], [("c", 1)]], True),
        ([torch.tensor([1, 2]), np.array([3])], True),
        ([[object()]], False),
        ([[1], iter([2])], False),
    ],
)
def test_what_items_stand_for(items: list[Any], is_told: bool) -> None:
    def digest(items: list[Any]) -> int:
        digest = OrderDigest()
        digest.begin_pass(0)
        digest.add(0, items)
        return digest.at(0, len(items))

    assert (digest(items) != 0) == is_told
    if is_told:
        assert digest(items) == digest(list(items)) != digest(items[::-1])
    else:
        assert [list(each) for each in items][-1], "the digest does not consume an iterator"
