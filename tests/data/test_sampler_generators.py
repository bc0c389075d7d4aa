"""Generators in a sampler's attributes: the order is a function of (seed, epoch), and the user's objects do not change."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SubsetRandomSampler, TensorDataset

from trainwright.data.loaders import ShardedLoader
from trainwright.data.seeding import SamplerGenerators, derive_seed

COUNT = 40
DATA = TensorDataset(torch.arange(COUNT))


class Drawn(Sampler[int]):
    """Draws from a generator in an attribute, four samples at a time."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng
        self.passes = 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        for _ in range(COUNT // 4):
            yield from self.four()

    def four(self) -> list[int]:
        if isinstance(self.rng, torch.Generator):
            return torch.randint(COUNT, (4,), generator=self.rng).tolist()
        if isinstance(self.rng, random.Random):
            return [self.rng.randrange(COUNT) for _ in range(4)]
        return list(self.rng.permutation(COUNT)[:4].tolist())


class Batches(Sampler[list[int]]):
    """A batch sampler with a generator, around a sampler with another generator of the same name."""

    def __init__(self, sampler: Any, rng: Any) -> None:
        self.sampler, self.rng = sampler, rng

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        while order:
            size = int(self.rng.randint(1, 5))
            yield order[:size]
            order = order[size:]


def loader(sampler: Any) -> DataLoader[Any]:
    if isinstance(sampler, Batches):
        return DataLoader(DATA, batch_sampler=sampler)
    return DataLoader(DATA, batch_size=4, sampler=sampler)


def read(share: ShardedLoader, epoch: int, start: int = 0) -> list[list[int]]:
    share.set_epoch(7, epoch, start)
    return [batch[0].tolist() for batch in share]


def alone(sampler: Any) -> ShardedLoader:
    return ShardedLoader(loader(sampler), rank=0, world_size=1, mode="train")


def state(rng: Any) -> Any:
    if isinstance(rng, torch.Generator):
        return rng.get_state().tolist()
    if isinstance(rng, random.Random):
        return rng.getstate()
    return repr(rng.get_state() if isinstance(rng, np.random.RandomState) else rng.bit_generator.state)


MADE: dict[str, Callable[[], Any]] = {
    "torch": lambda: Drawn(torch.Generator().manual_seed(1)),
    "RandomState": lambda: Drawn(np.random.RandomState()),
    "numpy's Generator": lambda: Drawn(np.random.default_rng()),
    "Philox": lambda: Drawn(np.random.Generator(np.random.Philox())),
    "python": lambda: Drawn(random.Random()),
    "numpy's global one": lambda: Drawn(np.random.mtrand._rand),  # type: ignore[attr-defined]
    "torch's global one": lambda: RandomSampler(DATA, generator=torch.default_generator),
    "in a batch sampler": lambda: Batches(Drawn(np.random.RandomState()), np.random.RandomState()),
    "shared": lambda: (lambda rng: Batches(Drawn(rng), rng))(np.random.RandomState()),
}


@pytest.mark.parametrize("kind", list(MADE))
def test_the_order_is_a_function_of_seed_and_epoch(kind: str) -> None:
    """Ranks and processes have unseeded generators in different states."""
    share = alone(MADE[kind]())
    first, second = read(share, 0), read(share, 1)
    assert first != second
    torch.manual_seed(99)
    assert read(alone(MADE[kind]()), 1) == second == read(share, 1)
    assert read(alone(MADE[kind]()), 1, start=3) == second[3:]
    ranks = [ShardedLoader(loader(MADE[kind]()), rank=rank, world_size=2, mode="evaluate") for rank in range(2)]
    left, right = (read(each, 1) for each in ranks)
    assert [(left, right)[number % 2][number // 2] for number in range(len(second))] == second


@pytest.mark.parametrize("kind", ["torch", "RandomState", "numpy's Generator", "Philox", "python"])
def test_the_users_objects_do_not_change(kind: str) -> None:
    sampler = MADE[kind]()
    rng, before = sampler.rng, state(sampler.rng)
    share = alone(sampler)
    share.set_epoch(7, 0)
    batches = iter(share)
    next(batches)
    assert sampler.rng is rng, "between two batches too"
    rest = list(batches)
    assert len(rest) == COUNT // 4 - 1
    assert sampler.rng is rng
    assert state(rng) == before
    assert sampler.passes == 1, "the user's sampler was iterated, not a copy"


def test_two_generators_of_one_sampler_are_unlike() -> None:
    sampler = Drawn(np.random.RandomState(1))
    sampler.other = np.random.RandomState(1)  # type: ignore[attr-defined]
    with SamplerGenerators(Batches(sampler, np.random.RandomState(1)), 1, 2).active():
        drawn = {each.randint(2**31 - 1) for each in (sampler.rng, sampler.other)}  # type: ignore[attr-defined]
    assert len(drawn) == 2
    batches = Batches(Drawn(np.random.RandomState(1)), np.random.RandomState(1))
    with SamplerGenerators(batches, 1, 2).active():
        assert batches.rng.randint(2**31 - 1) != batches.sampler.rng.randint(2**31 - 1)


def test_a_generator_that_the_sampler_makes_in_its_iter_is_used() -> None:
    class Anew(Drawn):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            self.rng = np.random.RandomState(self.epoch)
            return iter(self.rng.permutation(COUNT).tolist())

    sampler = Anew(np.random.RandomState(1))
    wanted = np.random.RandomState(3).permutation(COUNT).tolist()
    for _ in range(2):
        assert list(chain(*read(alone(sampler), 3))) == wanted


def test_an_unknown_kind_of_generator_is_not_replaced() -> None:
    class Mine(random.Random):
        pass

    for rng in (Mine(1), random.SystemRandom(), np.random, 5):
        sampler = Drawn(rng)
        with SamplerGenerators(sampler, 1, 2).active():
            assert sampler.rng is rng
    with SamplerGenerators([[1, 2], [3]], 1, 2).active():
        pass
    own_bits = type("Bits", (np.random.PCG64,), {})
    sampler = Drawn(np.random.Generator(own_bits(1)))
    with SamplerGenerators(sampler, 1, 2).active():
        assert type(sampler.rng.bit_generator) is np.random.PCG64


def test_separate_data_of_ranks_is_drawn_by_their_seeds() -> None:
    """If the user divides the data, ranks with equal seeds draw equal orders, and other ranks do not."""

    def drawn(rng: Any, rank: int) -> list[list[int]]:
        own = ShardedLoader(loader(Drawn(copy.deepcopy(rng))), rank=rank, world_size=2, mode="train", shard=False)
        first = read(own, 0)
        assert read(own, 1) != first == read(own, 0)
        return first

    for made in (np.random.RandomState, np.random.default_rng, random.Random):
        assert drawn(made(1), 0) == drawn(made(1), 1) != drawn(made(2), 1)


def test_torch_s_own_samplers_draw_as_in_earlier_versions() -> None:
    """So that runs continue from their checkpoints in the same order."""
    generator = torch.Generator().manual_seed(5)
    wanted = torch.randperm(COUNT, generator=torch.Generator().manual_seed(derive_seed(7, 1, 5))).tolist()
    assert list(chain(*read(alone(RandomSampler(DATA, generator=generator)), 1))) == wanted
    whole = SubsetRandomSampler(range(COUNT), generator=generator)
    assert list(chain(*read(alone(whole), 1))) == wanted
