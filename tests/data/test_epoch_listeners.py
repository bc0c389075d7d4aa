"""Epoch listeners: every part of a loader with a `set_epoch` gets the epoch, also in workers' copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small import ON_HOST, QUIET, Classifier
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    StackDataset,
    Subset,
    random_split,
)

import trainwright as tw
from trainwright.data.loaders import ShardedLoader


class Told:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch = -1
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)


class Items(Told, Dataset[Any]):
    """Items contain their number and the epoch of this copy."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, self.epoch])


class Stream(Told, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([torch.tensor([index, self.epoch]) for index in range(4)])


class Order(Told, Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        return 8


class Batches(Told, BatchSampler):
    pass


class Loader(Told, DataLoader[Any]):
    pass


WORKERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.mark.parametrize("options", WORKERS, ids=str)
@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("kind", [Items, Stream])
def test_the_dataset_that_is_read_knows_the_epoch(kind: Any, batch_size: Any, options: dict[str, Any]) -> None:
    share = ShardedLoader(DataLoader(kind(), batch_size=batch_size, **options), rank=0, world_size=1, mode="train")
    for epoch in (3, 4, 5):
        share.set_epoch(1, epoch)
        read = [batch.reshape(-1, 2).tolist() for batch in share]
        assert {each[1] for batch in read for each in batch} == {epoch}
        assert {each[0] for batch in read for each in batch} == set(range(8 if kind is Items else 4))
    share.close()


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_datasets_inside_torch_wrappers_are_told_the_epoch(options: dict[str, Any]) -> None:
    parts = random_split(Items(), [4, 4])
    made: list[Any] = [
        Subset(Subset(Items(), range(6)), range(4)),
        ConcatDataset([Items(), parts[0]]),
        StackDataset(Items(), parts_of_eight := ConcatDataset(parts)),
        StackDataset(first=Items(), second=parts_of_eight),
        ChainDataset([Stream(), Stream()]),
    ]
    for dataset in made:
        share = ShardedLoader(DataLoader(dataset, batch_size=2, **options), rank=0, world_size=1, mode="train")
        for epoch in (3, 4):
            share.set_epoch(1, epoch)
            read = [each for batch in share for each in (batch.values() if isinstance(batch, dict) else [batch])]
            flat = [each for found in read for each in (found if isinstance(found, list) else [found])]
            assert {told for found in flat for _, told in found.tolist()} == {epoch}, type(dataset).__name__
        share.close()


def test_loader_sampler_and_batch_sampler_are_told_once_each() -> None:
    data, order = Items(), Order()
    batches = Batches(order, 2, False)
    loader = Loader(data, batch_sampler=batches)
    share = ShardedLoader(loader, rank=1, world_size=2, mode="train")
    for epoch in (0, 1):
        share.set_epoch(1, epoch)
        list(share)
    assert [each.told for each in (data, order, batches, loader)] == [[0, 1]] * 4


def test_datasets_are_told_every_epoch_in_both_loops() -> None:
    class Pairs(Items):
        def __getitem__(self, index: int) -> Any:
            return torch.full((8,), 0.1), torch.tensor(index % 3)

    trained, evaluated = Pairs(), Pairs()
    trainer = tw.Trainer(max_epochs=3, **QUIET)
    trainer.fit(Classifier(), DataLoader(trained, batch_size=4), DataLoader(evaluated, batch_size=4))
    assert sorted(set(trained.told)) == [0, 1, 2]
    assert set(evaluated.told) == {0}, "evaluations have the same samples"
    data = Pairs()
    loader = tw.Accelerator(cpu=ON_HOST).prepare(DataLoader(data, batch_size=4))
    for _ in range(3):
        list(loader)
    assert data.told == [0, 1, 2]


def test_a_stream_that_is_split_after_a_shuffle_keeps_its_parts_apart() -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": list(range(20))}).to_iterable_dataset(num_shards=4)
    shuffled = stream.shuffle(seed=3, buffer_size=20)
    with pytest.warns(UserWarning, match=r"take\(\) or skip\(\) follows a shuffle"):
        parts = [ShardedLoader(DataLoader(part, 4), rank=0, world_size=1, mode="train")
                 for part in (shuffled.skip(8), shuffled.take(8))]  # fmt: skip
    orders = []
    for epoch in range(2):
        seen = []
        for part in parts:
            part.set_epoch(0, epoch)
            seen += [number for batch in part for number in batch["x"].tolist()]
            part.load_state_dict(part.state_dict(3, is_over=True))
        assert sorted(seen) == list(range(20))
        orders.append(seen)
    assert orders[0] == orders[1]
    (after,) = [ShardedLoader(DataLoader(stream.skip(8).shuffle(seed=3), 4), rank=0, world_size=1, mode="train")]
    orders = []
    for epoch in range(2):
        after.set_epoch(0, epoch)
        orders.append([number for batch in after for number in batch["x"].tolist()])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
