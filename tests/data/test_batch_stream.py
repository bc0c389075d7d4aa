"""Loaders without indices. Ranks share a stream by reading all of it, from any batch on. (seed, epoch) determines its order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from starts import Starts, some_or_every
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainwright.data.batch_stream import round_sizes, sample_counts
from trainwright.data.combined_loader import is_read_once
from trainwright.data.loaders import ShardedLoader, with_last


class Counting(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.count))


class Shuffled(IterableDataset[Any]):
    """Draws its order and its items while it is read. Every worker reads a part."""

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


@some_or_every
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_reads_its_part_of_the_stream_once(world_size: int, starts: Starts) -> None:
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


def test_ranks_of_different_length_are_stopped_together() -> None:
    """The other rank has three batches. This rank asks before every batch, and once more at its end."""
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


def test_samples_are_counted_by_the_first_dimension_of_columns_and_by_the_length_of_lists() -> None:
    tensor, array = torch.zeros(3, 2), torch.zeros(3, 2).numpy()
    image, box, label = torch.zeros(3, 4, 4), torch.zeros(2, 4), {"label": 0}
    graphs = type("Batch", (), {"num_graphs": 5})()
    described = {"from": {"shard": 1, "names": "ab"}, "x": tensor}
    for count, batch in (
        (3, tensor),
        (3, array),
        (3, [tensor, 1]),
        (3, (array, array)),
        (3, [torch.tensor(1.0), tensor]),
        (3, {"n": torch.tensor(1), "x": tensor}),
        (3, described),
        (3, {"x": tensor, "more": [tensor]}),
        (3, {"pixels": tensor, "labels": [{"boxes": box}] * 3}),
        (3, [[tensor, tensor], tensor]),  # default_collate makes it of ((a, b), c)
        (2, list(array[:2])),
        (2, ["a", "b"]),
        (2, {"name": ["a", "b"]}),
        (5, graphs),
        (8, ([image] * 8, [label] * 8)),
        (8, ([image] * 8, [{"boxes": box, "labels": torch.ones(2)}] * 8)),
        (8, ([image] * 8, [torch.tensor(1)] * 8)),
        (8, {"images": [image] * 8, "labels": torch.zeros(8)}),
        (8, [(image, 1)] * 8),
        (8, [(image, box)] * 8),
        (8, [{"image": image, "height": 4}] * 8),
        (1, [{"image": image, "height": 4}]),
        (1, ([image], [label])),
    ):
        assert sample_counts(batch) == [count], batch
    assert [sample_counts(batch) for batch in (torch.tensor(1), array[0, 0], "abc", 5, None, iter([image]), [])] == [
        []
    ] * 7
    assert sample_counts([torch.zeros(7, 3, 2), torch.zeros(3)]) == [7, 3]


def test_a_last_round_with_unclear_samples_is_named_and_weighs_by_the_first_part() -> None:
    assert round_sizes([[8], [8]], 2) == round_sizes([[7, 3], [7, 3]], 2) == []
    assert round_sizes([[8], [2]], 2) == [8, 2]
    with pytest.warns(UserWarning, match=r"samples in a batch is unclear: .*\[7, 3\].*collate_fn"):
        assert round_sizes([[7, 3], [5, 2]], 3) == [7, 5, 0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_raw_loop_ranks_keep_whole_batches(world_size: int) -> None:
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


def test_a_loader_that_cannot_be_sharded_is_rejected_with_advice() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    advice = "set use_distributed_sampler=False .or do not pass (the|its) loader to prepare"
    with pytest.raises(TypeError, match=f"Own overrides __iter__.*{advice}"):
        shares(Own([1, 2]), 2)


class Restarting:
    """Its __iter__ begins again and returns itself, like NVIDIA DALI's iterators."""

    def __iter__(self) -> Restarting:
        self.next = 0
        return self

    def __next__(self) -> int:
        if self.next == len(self):
            raise StopIteration
        self.next += 1
        return self.next

    def __len__(self) -> int:
        return 3


def test_a_loader_that_restarts_itself_is_read_in_each_epoch() -> None:
    (share,) = shares(Restarting(), 1)
    assert [read(share) for _ in range(2)] == [[1, 2, 3], [1, 2, 3]]
    assert not is_read_once(Restarting())
    assert all(is_read_once(each) for each in (iter([1]), (each for each in [1]), iter(DataLoader([1, 2]))))
