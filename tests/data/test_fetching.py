"""Batches that this process fetches equal the batches of torch's iterator, for all kinds of datasets and collate functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset
from torch.utils.data.datapipes.map import SequenceWrapper

import trainwright as tw
from trainwright.data.loaders import ShardedLoader, fetched, is_fetched_here


class Items(Dataset[Any]):
    """Pairs, of which `__getitems__` reads several at once."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return torch.tensor(index), {"name": str(index)}


class Several(Items):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(list(indices))
        return [(torch.tensor(index), {"name": str(index)}) for index in indices]


class Whole(Items):
    """Its index is a list, so the dataset makes the batches."""

    def __getitem__(self, index: Any) -> Any:
        self.asked.append(index)
        return torch.tensor(index)


def plain(loader: Any) -> list[Any]:
    return [repr(batch) for batch in loader]


@pytest.mark.parametrize("options", [
    {"batch_size": 3},
    {"batch_size": 3, "drop_last": True},
    {"batch_size": None},
    {"batch_size": 2, "collate_fn": lambda items: [name for _, name in items]},
    {"batch_size": None, "collate_fn": lambda item: item[0] + 1},
    {"batch_sampler": [[0, 6], [3], []], "collate_fn": list},
    {"batch_size": 2, "sampler": [5, 1, 4]},
])  # fmt: skip
@pytest.mark.parametrize("kind", [Items, Several])
def test_batches_are_those_of_torch(kind: type[Items], options: dict[str, Any]) -> None:
    loader = DataLoader(kind(), **options)
    assert is_fetched_here(loader)
    own, ours = kind(), kind()
    assert plain(fetched(DataLoader(ours, **options))) == plain(DataLoader(own, **options))
    assert ours.asked == own.asked


def test_batches_of_datasets_and_plain_sequences_are_fetched() -> None:
    batches = BatchSampler(SequentialSampler(range(7)), 3, drop_last=False)
    assert plain(fetched(DataLoader(Whole(), batch_size=None, sampler=batches))) == plain(
        DataLoader(Whole(), batch_size=None, sampler=batches)
    )
    numbers: Any = [4.0, 5.0, 6.0]
    assert plain(fetched(DataLoader(numbers, batch_size=2))) == plain(DataLoader(numbers, batch_size=2))
    assert plain(fetched(DataLoader("abc", batch_size=2))) == plain(DataLoader("abc", batch_size=2))  # type: ignore[arg-type]


class OwnIterator(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return iter(["own"])


def test_loaders_that_torch_has_to_iterate() -> None:
    data = TensorDataset(torch.arange(4))
    for loader in (
        OwnIterator(data),
        DataLoader(data, num_workers=1),
        DataLoader(data, pin_memory=True),
        DataLoader(SequenceWrapper([1, 2])),
        [torch.ones(2)],
    ):
        assert not is_fetched_here(loader)
    own = ShardedLoader(OwnIterator(data), rank=0, world_size=1, mode="test")
    own.set_epoch(0, 0)
    assert list(own) == ["own"]


def test_an_error_of_the_dataset_comes_as_it_is_and_sampling_is_lazy() -> None:
    drawn: list[int] = []

    class Noting(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            for index in super().__iter__():
                drawn.append(index)
                yield index

    class Failing(Items):
        def __getitem__(self, index: int) -> Any:
            if index == 2:
                raise KeyError("broken")
            return index

    data = Failing()
    batches = fetched(DataLoader(data, sampler=Noting(data)))
    assert [next(batches), next(batches)] == [torch.tensor([0]), torch.tensor([1])]
    assert drawn == [0, 1]
    with pytest.raises(KeyError, match="broken"):
        next(batches)
    assert next(batches) == torch.tensor([3])  # torch's iterator also continues after an error


@pytest.mark.parametrize("size", [None, 1, 3])
def test_a_stop_iteration_of_the_dataset_ends_the_pass_and_cuts_no_batch(size: int | None) -> None:
    """Like a dataset that reads a file from start to end, whatever the index."""

    class Reads(Items):
        def __init__(self) -> None:
            self.lines = iter(range(5))

        def __getitem__(self, index: int) -> Any:
            return next(self.lines)

    assert plain(fetched(DataLoader(Reads(), batch_size=size))) == plain(DataLoader(Reads(), batch_size=size))
    with pytest.raises(RuntimeError, match="the training loader yielded 1 batches, but its length is 3"):
        trainer().fit(Net(), DataLoader(Reads(), batch_size=3, collate_fn=lambda items: torch.ones(len(items), 3)))


class Net(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.seen: list[Tensor] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.seen.append(batch.clone())
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def trainer() -> tw.Trainer:
    return tw.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu"
    )
