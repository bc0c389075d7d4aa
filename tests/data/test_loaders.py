"""Sharding: every sample once, the same order on every rank, a pure function of (seed, epoch), from any batch on."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from deadlines import deadline
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

from trainwright.data.loaders import ShardedLoader


def shards(loader: Any, world_size: int, mode: Any = "train") -> list[ShardedLoader]:
    return [ShardedLoader(loader, rank=rank, world_size=world_size, mode=mode) for rank in range(world_size)]


def batches(shard: ShardedLoader, epoch: int = 0, start: int = 0, seed: int = 1) -> list[list[int]]:
    shard.set_epoch(seed, epoch, start)
    return [batch[0].tolist() if isinstance(batch, (list, tuple)) else batch.tolist() for batch in shard]


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["train", "evaluate", "padded"])
def test_every_sample_counts_once(mode: str, world_size: int) -> None:
    for count, size, drop_last, shuffle in itertools.product(range(1, 30), (1, 3, 4), (False, True), (False, True)):
        loader = DataLoader(numbers(count), batch_size=size, drop_last=drop_last, shuffle=shuffle)
        wanted = count // size * size if drop_last else count
        if mode == "train" and drop_last and world_size > 1:
            wanted = count // size // world_size * world_size * size  # short rounds and short batches are dropped
        if mode == "train" and drop_last and 0 < len(loader) < world_size:
            with pytest.raises(ValueError, match=f"has {len(loader)} batches for {world_size} ranks"):
                shards(loader, world_size, mode)
            continue
        parts = shards(loader, world_size, mode)
        got = [batches(part) for part in parts]
        assert [len(each) for each in got] == [len(part) for part in parts]
        if mode == "padded":
            got = [each[: part.real_length] for each, part in zip(got, parts, strict=True)]
        if parts[0].uneven:
            ((last, sizes),) = parts[0].uneven.items()
            assert last == len(parts[0]) - 1
            assert max(sizes) <= size
            assert 1 not in sizes or sum(sizes) == 1 or sum(sizes) > world_size * (size - 1), "a batch of one"
            got = [[*each[:-1], each[-1][:real]] for each, real in zip(got, sizes, strict=True)]
        if mode in ("train", "padded"):
            assert len({len(part) for part in parts}) == 1, "every rank makes the same number of rounds"
        assert sorted(sample for each in got for batch in each for sample in batch) == sorted(
            set(itertools.chain.from_iterable(itertools.chain.from_iterable(got)))
        ), "no sample twice"
        assert sum(len(batch) for each in got for batch in each) == wanted


def test_the_order_is_a_function_of_seed_and_epoch_and_leaves_the_generators_alone() -> None:
    loader = DataLoader(numbers(50), batch_size=4, shuffle=True)
    shard = shards(loader, 1)[0]
    first = batches(shard, epoch=0)
    torch.manual_seed(99)
    before = (torch.get_rng_state(), random.getstate())
    second = batches(shard, epoch=1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert batches(shard, epoch=0) == first != second
    assert batches(shard, epoch=0, seed=2) != first
    assert batches(shard, epoch=1, start=5) == second[5:]


def test_a_round_of_two_ranks_is_the_batch_of_one() -> None:
    alone = batches(shards(DataLoader(numbers(40), batch_size=8, shuffle=True), 1)[0])
    left, right = (batches(each) for each in shards(DataLoader(numbers(40), batch_size=4, shuffle=True), 2))
    assert [a + b for a, b in zip(left, right, strict=True)] == alone


def test_ranks_divide_the_batches_of_a_batch_sampler_that_the_user_passes() -> None:
    loader = DataLoader(numbers(16), batch_sampler=BatchSampler(range(16), 8, False))
    parts = [ShardedLoader(loader, rank=rank, world_size=2, mode="train", batch_parts=2) for rank in range(2)]
    assert [batches(part) for part in parts] == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13, 14, 15]]]


def test_the_last_round_weighs_by_its_samples() -> None:
    parts = shards(DataLoader(numbers(13), batch_size=4), 2)
    assert [[len(batch) for batch in batches(part)] for part in parts] == [[4, 3], [4, 2]]
    assert [part.weight_at(1) for part in parts] == [3 * 2 / 5, 2 * 2 / 5]
    even = shards(DataLoader(numbers(16), batch_size=4), 2)
    assert [len(batches(part)) for part in even] == [2, 2]
    assert [dict(part.uneven) for part in even] == [{}, {}]


class Drawing(Sampler[int]):
    """Draws from every global generator during its iteration."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.count):
            yield int(torch.randint(100, ()).item() + np.random.randint(100) + random.randrange(100))


def test_a_sampler_that_draws_as_it_goes_is_repeatable() -> None:
    shard = shards(DataLoader(numbers(300), sampler=Drawing(2000), batch_size=2), 1)[0]
    first = batches(shard, epoch=3)
    random.seed(1)
    assert batches(shard, epoch=3) == first != batches(shard, epoch=4)
    halves = shards(DataLoader(numbers(300), sampler=Drawing(2000), batch_size=2), 2)
    left, right = (batches(each, epoch=3) for each in halves)
    assert [batch for pair in zip(left, right, strict=True) for batch in pair] == first


def test_a_generator_of_the_users_is_left_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    dataset = numbers(40)
    loader = DataLoader(dataset, batch_size=4, sampler=RandomSampler(dataset, generator=generator))
    shard = shards(loader, 1)[0]
    first = batches(shard, epoch=0)
    assert batches(shard, epoch=1) != first == batches(shard, epoch=0)
    assert torch.equal(generator.get_state(), state)
    other = RandomSampler(dataset, generator=torch.Generator().manual_seed(6))
    assert batches(shards(DataLoader(dataset, batch_size=4, sampler=other), 1)[0]) != first


def test_set_epoch_reaches_a_sampler_that_has_it() -> None:
    class Counting(Drawing):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    sampler = Counting(8)
    shard = shards(DataLoader(numbers(300), sampler=sampler, batch_size=2), 1)[0]
    batches(shard, epoch=7)
    assert sampler.epoch == 7


class Special(DataLoader[Any]):
    """A loader whose constructor cannot be called again."""

    def __init__(self, secret: object, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.secret = secret


def test_a_subclass_is_copied_and_not_built_anew() -> None:
    loader = Special("secret", numbers(10), batch_size=2, num_workers=2, persistent_workers=True)
    whole = [batch[0].tolist() for batch in loader]  # a used persistent loader stores its iterator
    halves = [batches(part) for part in shards(loader, 2, "evaluate")]
    assert [halves[i % 2][i // 2] for i in range(5)] == whole
    assert [batch[0].tolist() for batch in loader] == whole
    assert isinstance(shards(loader, 2)[0]._source, Special)
    assert loader._iterator is not None
    loader._iterator._shutdown_workers()


def test_a_custom_batch_sampler_is_shared_out() -> None:
    groups = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    left, right = (batches(part) for part in shards(DataLoader(numbers(11), batch_sampler=groups), 2, "evaluate"))
    assert (left, right) == ([[0, 1, 2], [4, 5], [10]], [[3], [6, 7, 8, 9]])
    # One sample is too few for two ranks, so the second rank works on it with weight zero.
    parts = shards(DataLoader(numbers(11), batch_sampler=groups), 2)
    assert [batches(part) for part in parts] == [[[0, 1, 2], [4, 5], [10]], [[3], [6, 7, 8, 9], [10]]]
    assert [part.weight_at(2) for part in parts] == [2.0, 0.0]


def test_ready_batches_are_divided_among_ranks() -> None:
    items = DataLoader([torch.full((2,), index) for index in range(7)], batch_size=None)
    left, right = (batches(part) for part in shards(items, 2, "evaluate"))
    assert [len(left), len(right)] == [4, 3]
    parts = shards(items, 2)
    left, right = (batches(part) for part in parts)
    assert [left[-1], right[-1], *(part.weight_at(3) for part in parts)] == [[6, 6], [6, 6], 2.0, 0.0]


def test_a_distributed_sampler_of_the_users_is_respected() -> None:
    dataset = numbers(12)
    for rank in range(2):
        sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=False)
        shard = ShardedLoader(DataLoader(dataset, batch_size=3, sampler=sampler), rank=rank, world_size=2, mode="train")
        assert batches(shard) == [[rank, rank + 2, rank + 4], [rank + 6, rank + 8, rank + 10]]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(itertools.count())


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.mark.parametrize(
    ("loader", "match"), [([1, 2], "a list is not a DataLoader"), (OwnIteration(numbers(4)), "overrides __iter__")]
)
def test_a_loader_that_ranks_cannot_share_is_rejected(loader: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match + ".*use_distributed_sampler=False"):
        shards(loader, 2)
    assert shards(loader, 1)
    assert ShardedLoader(loader, rank=1, world_size=2, mode="train", shard=False)


def test_data_that_the_user_has_shared_out_is_used_whole() -> None:
    """Its order depends on (seed, epoch), it begins at any batch, and a DistributedSampler gets the epoch."""
    loader = DataLoader(numbers(10), batch_size=3, shuffle=True)
    alone = ShardedLoader(loader, rank=0, world_size=1, mode="train")
    own = ShardedLoader(loader, rank=1, world_size=2, mode="train", shard=False)
    assert batches(own, 2) == batches(alone, 2) != batches(own, 3)
    assert batches(own, 2, start=2) == batches(alone, 2)[2:]
    assert (own.exact_length, own.weight_at(3), own.ends_together) == (4, 1.0, True)
    sampler = DistributedSampler(numbers(12), num_replicas=3, rank=2, seed=5)
    shard = ShardedLoader(
        DataLoader(numbers(12), batch_size=2, sampler=sampler), rank=1, world_size=2, mode="train", shard=False
    )
    first, second = batches(shard, 0), batches(shard, 1)
    assert first != second == batches(shard, 1)
    sampler.set_epoch(1)
    assert list(sampler) == list(itertools.chain.from_iterable(second))
    assert batches(shard, 1, start=1) == second[1:]


def test_shuffling_is_switched_off() -> None:
    def ordered(loader: Any) -> list[list[int]]:
        return batches(ShardedLoader(loader, rank=0, world_size=1, mode="train", in_order=True))

    assert ordered(DataLoader(numbers(5), batch_size=2, shuffle=True)) == [[0, 1], [2, 3], [4]]
    assert ordered(DataLoader(numbers(5), batch_size=2, shuffle=True, drop_last=True)) == [[0, 1], [2, 3]]
    assert ordered(DataLoader(torch.arange(3), batch_size=None, shuffle=True)) == [0, 1, 2]
    assert ordered(DataLoader(numbers(4), batch_sampler=[[3, 1], [0]])) == [[3, 1], [0]]
    own = DataLoader(numbers(5), sampler=RandomSampler(numbers(5), replacement=True, num_samples=2))
    with pytest.warns(
        UserWarning, match="the loader's RandomSampler chooses the order. The order of the dataset replaces it"
    ):
        assert ordered(own) == [[0], [1], [2], [3], [4]]
    with pytest.warns(UserWarning, match="the loader's Drawing chooses"):
        assert ordered(DataLoader(numbers(300), sampler=Drawing(4)))[0] == [0]
    subset = SubsetRandomSampler([7, 1, 4])
    loader = DataLoader(numbers(9), 2, sampler=subset)
    with pytest.warns(UserWarning, match="the loader's SubsetRandomSampler chooses.*replaces"):
        assert ordered(loader) == [[1, 4], [7]]
    assert loader.sampler is loader.batch_sampler.sampler is subset, "the user's loader keeps its sampler"  # type: ignore[union-attr]
    shuffled = BatchSampler(RandomSampler(numbers(4)), 2, False)
    own_batches = type("OwnBatches", (BatchSampler,), {})(shuffled.sampler, 2, False)
    with pytest.warns(UserWarning, match="the loader's OwnBatches chooses the order. Pass another sampler"):
        assert len(ordered(DataLoader(numbers(4), batch_sampler=own_batches))) == 2


def test_memory_is_pinned_by_a_copy() -> None:
    loader = DataLoader(numbers(4))
    share = ShardedLoader(loader, rank=0, world_size=1, mode="train", pin_memory=True)
    assert share._source.pin_memory is True  # type: ignore[attr-defined]
    assert loader.pin_memory is False


def test_a_value_that_is_no_loader_is_rejected() -> None:
    with pytest.raises(TypeError, match="int is not iterable"):
        shards(3, 1)


def test_a_distributed_sampler_is_found_in_a_batch_sampler_and_must_fit() -> None:
    dataset = numbers(16)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, False))
    assert batches(ShardedLoader(loader, rank=1, world_size=2, mode="train")) == [[1, 3, 5, 7], [9, 11, 13, 15]]
    with pytest.raises(ValueError, match="has num_replicas=2, but this job has 3 ranks"):
        shards(loader, 3)


def test_an_endless_sampler_has_no_length_and_is_shared() -> None:
    class Forever(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return itertools.cycle(range(10))

    loader = DataLoader(numbers(10), batch_sampler=BatchSampler(Forever(), 2, False))
    left, right = shards(loader, 2)
    assert left.length is None
    left.set_epoch(1, 0)
    right.set_epoch(1, 0)
    assert [batch[0].tolist() for batch in itertools.islice(left, 2)] == [[0, 1], [4, 5]]
    assert [batch[0].tolist() for batch in itertools.islice(right, 2)] == [[2, 3], [6, 7]]


@pytest.mark.parametrize("mode", ["train", "evaluate"])
def test_batches_come_in_order_though_the_loader_has_in_order_off(mode: str) -> None:
    other_is_done = multiprocessing.Event()

    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            if index == 0:
                other_is_done.wait(deadline(60))
            if index == 3:
                other_is_done.set()
            return super().__getitem__(index)

    loader = DataLoader(Slow(torch.arange(8)), num_workers=2, in_order=False)
    with pytest.warns(UserWarning, match=r"in_order=False is ignored: batches come in the order .* resume"):
        share = ShardedLoader(loader, rank=0, world_size=1, mode=mode)  # type: ignore[arg-type]
    assert batches(share) == [[each] for each in range(8)]
    assert loader.in_order is False, "the user's loader does not change"


def test_a_users_sampler_may_follow_the_training() -> None:
    class Follows(Sampler[int]):
        latest = 0

        def __iter__(self) -> Iterator[int]:
            for _ in range(6):
                yield self.latest

        def __len__(self) -> int:
            return 6

    for wrapped in (False, True):
        sampler: Any = Follows()
        loader = DataLoader(
            numbers(6), **({"batch_sampler": BatchSampler(sampler, 1, False)} if wrapped else {"sampler": sampler})
        )
        share = ShardedLoader(loader, rank=0, world_size=1, mode="train")
        share.set_epoch(1, 0)
        seen = []
        for number, (batch,) in enumerate(share, start=1):
            seen += batch.tolist()
            sampler.latest = number
        assert seen == [0, 1, 2, 3, 4, 5]
