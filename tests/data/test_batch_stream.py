"""Loaders without indices: shared by reading, the same at every pass of one (seed, epoch), from any batch on."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from starts import Starts, some_or_every
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainwright.data.batch_stream import count_samples
from trainwright.data.loaders import ShardedLoader, with_last

READ_WHOLE = "ignore:an? .* is an IterableDataset:UserWarning"


class Counting(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.count))


class Shuffled(IterableDataset[Any]):
    """Draws its order and each item as it goes; each worker has a part."""

    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        place, parts = (info.id, info.num_workers) if info is not None else (0, 1)
        if info is not None:
            assert isinstance(info.dataset, Shuffled)
        order = list(range(place, self.count, parts))
        random.shuffle(order)
        for number in order:
            yield torch.tensor([number, torch.rand(()).item()])


def shares(loader: Any, world_size: int, mode: Any = "train", **options: Any) -> list[ShardedLoader]:
    return [ShardedLoader(loader, rank=rank, world_size=world_size, mode=mode, **options) for rank in range(world_size)]


def read(share: ShardedLoader, epoch: int = 0, start: int = 0, seed: int = 1) -> list[Any]:
    share.set_epoch(seed, epoch, start)
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in share]


@pytest.mark.filterwarnings(READ_WHOLE)
@some_or_every
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_sample_counts_once(world_size: int, starts: Starts) -> None:
    for count, size, drop_last in itertools.product(range(14), (1, 3), (False, True)):
        loader = DataLoader(Counting(count), batch_size=size, drop_last=drop_last)
        alone = read(ShardedLoader(loader, rank=0, world_size=1, mode="evaluate"))
        parts = [read(share) for share in shares(loader, world_size, "evaluate")]
        assert [batch for each in itertools.zip_longest(*parts) for batch in each if batch] == alone
        ghosts = shares(loader, world_size, "padded")
        parts = [read(share) for share in ghosts]
        assert len(set(map(len, parts))) == 1
        real = [part[: share.real_length] for part, share in zip(parts, ghosts, strict=True)]
        assert [batch for each in itertools.zip_longest(*real) for batch in each if batch] == alone
        training = shares(loader, world_size)
        parts = [read(share) for share in training]
        assert len(set(map(len, parts))) == 1
        rounds = list(zip(*parts, strict=True))
        kept = len(alone) // world_size * world_size if drop_last else len(alone)
        assert [batch for each in rounds for batch in each][:kept] == alone[:kept]
        if training[0].uneven:
            last = alone[(len(rounds) - 1) * world_size :]
            sizes = [len(batch) for batch in last] + [0] * (world_size - len(last))
            assert dict(training[0].uneven) == {len(rounds) - 1: sizes}
            assert sum(share.weight_at(len(rounds) - 1) for share in training) == pytest.approx(world_size)
        for share, part in zip(training, parts, strict=True):
            assert all(read(share, start=start) == part[start:] for start in starts(len(part)))


@pytest.mark.filterwarnings(READ_WHOLE)
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_what_is_drawn_is_a_function_of_seed_and_epoch(workers: dict[str, Any]) -> None:
    loader = DataLoader(Shuffled(), batch_size=2, **workers)
    share = ShardedLoader(loader, rank=0, world_size=1, mode="train")
    first = read(share, epoch=0)
    random.seed(3)
    torch.manual_seed(3)
    before = (random.getstate(), torch.get_rng_state())
    second = read(share, epoch=1)
    assert second != first == read(share, epoch=0)
    assert read(share, epoch=1, start=4) == second[4:]
    assert read(share, epoch=1, seed=2) != second
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert share.may_read_ahead
    random.seed(4)
    left, right = (read(each, epoch=1) for each in shares(loader, 2))
    assert [batch for pair in zip(left, right, strict=True) for batch in pair] == second


@pytest.mark.filterwarnings(READ_WHOLE)
def test_an_endless_dataset_is_shared_and_has_no_length() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(itertools.count())

    for rank, share in enumerate(shares(DataLoader(Endless(), batch_size=2), 3)):
        assert share.length is None
        assert share.ends_together
        share.set_epoch(1, 0, 2)
        pairs = with_last(share, 2, None, most=4)
        first = 2 * (6 + rank)
        assert [(batch.tolist(), is_last) for batch, is_last in pairs] == [
            ([first, first + 1], False),
            ([first + 6, first + 7], True),
        ]


def test_reading_whole_is_said_once_on_rank_0() -> None:
    with pytest.warns(UserWarning, match="each of the 2 ranks reads all of it.*use_distributed_sampler=False"):
        ShardedLoader(DataLoader(Counting(3)), rank=0, world_size=2, mode="train")
    with warnings.catch_warnings(record=True) as said:
        ShardedLoader(DataLoader(Counting(3)), rank=1, world_size=2, mode="train")
        ShardedLoader(DataLoader(Counting(3)), rank=0, world_size=2, mode="train", shard=False)
    assert said == []


def test_data_that_the_user_has_shared_out() -> None:
    for loader in (DataLoader(Counting(5), batch_size=2), [[0, 1], [2, 3], [4]]):
        for share in shares(loader, 3, shard=False):
            assert read(share) == [[0, 1], [2, 3], [4]]
            assert (share.weight_at(2), dict(share.uneven)) == (1.0, {})
    assert [share.ends_together for share in shares([1, 2], 2, shard=False)] == [True, True], "lengths can be compared"
    uncertain = shares(DataLoader(Counting(5)), 2, shard=False)
    assert [share.ends_together for share in uncertain] == [False, False]
    drawn = [read(share) for share in shares(DataLoader(Shuffled(), num_workers=1), 2, shard=False)]
    assert drawn[0] != drawn[1], "workers of two ranks draw differently"


def test_ranks_that_may_end_apart_end_together() -> None:
    """The other rank has three batches; this one is asked before each, and once more at its end."""
    asked: list[bool] = []

    def all_have(has_one: bool) -> bool:
        asked.append(has_one)
        return has_one and len(asked) <= 3

    share = ShardedLoader(DataLoader(Counting(9)), rank=0, world_size=2, mode="train", shard=False)
    share.set_epoch(1, 0)
    assert [(int(batch), is_last) for batch, is_last in with_last(share, 0, None, all_have=all_have)] == [
        (0, False),
        (1, False),
        (2, True),
    ]
    assert asked == [True] * 4


def test_how_many_samples_a_batch_has() -> None:
    tensor = torch.zeros(3, 2)
    assert [count_samples(each) for each in (tensor, [tensor, 1], {"n": torch.tensor(1), "x": tensor})] == [3, 3, 3]
    described = {"from": {"shard": 1, "names": "ab"}, "x": tensor}
    assert [count_samples(each) for each in (described, [described], {"n": 1, "x": tensor})] == [3, 3, 3]
    array = tensor.numpy()
    assert [count_samples(each) for each in (array, (array, array), list(array[:2]), array[0, 0])] == [3, 3, 2, None]
    assert [count_samples(each) for each in (["a", "b"], {"name": ["a", "b"]}, torch.tensor(1), "abc", 5)] == [
        2,
        2,
        None,
        None,
        None,
    ]


@pytest.mark.filterwarnings(READ_WHOLE)
@pytest.mark.parametrize("world_size", [2, 3])
def test_in_a_loop_of_ones_own_each_rank_keeps_whole_batches(world_size: int) -> None:
    for count, drop_last in itertools.product(range(1, 14), (False, True)):
        loader = DataLoader(Counting(count), batch_size=3, drop_last=drop_last)
        alone = read(ShardedLoader(loader, rank=0, world_size=1, mode="train"))
        ranks = shares(loader, world_size)
        parts = [read(share) for share in ranks]
        assert len(set(map(len, parts))) == 1
        sizes = ranks[0].uneven.get(len(parts[0]) - 1)
        rounds = list(zip(*parts, strict=True))
        if sizes is not None:
            rounds[-1] = tuple(batch[:size] for batch, size in zip(rounds[-1], sizes, strict=True))
        kept = len(alone) // world_size * world_size if drop_last else len(alone)
        assert [batch for each in rounds for batch in each if batch] == alone[:kept]


def test_what_no_rank_can_share_is_told_with_what_its_caller_has() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    advice = "set use_distributed_sampler=False .or leave (the|its) loader out of prepare"
    with pytest.raises(TypeError, match=f"Own overrides __iter__.*{advice}"):
        shares(Own([1, 2]), 2)
    with pytest.warns(UserWarning, match=f"one batch in 2. If it splits itself by rank, {advice}"):
        shares(DataLoader(Counting(3)), 2)
