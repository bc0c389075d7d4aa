"""Ranks that draw different data from a sharded loader get an error or a warning; everyday loaders do not."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import trainwright as tw

NUMBERS = TensorDataset(torch.arange(24.0)[:, None])


class OwnShare(Sampler[int]):
    """Draws this rank's samples, but is no DistributedSampler."""

    def __init__(self, rank: int) -> None:
        self.mine = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.mine, 24, 2))

    def __len__(self) -> int:
        return 12


class Declared(OwnShare):
    """Declares it like torch's DistributedSampler."""

    num_replicas = 2


class Counted(Sampler[int]):
    """Shuffles with a generator in an attribute, and counts its iterations."""

    def __init__(self, seed: int) -> None:
        self.generator, self.reads = torch.Generator().manual_seed(seed), 0

    def __iter__(self) -> Iterator[int]:
        self.reads += 1
        return iter(torch.randperm(24, generator=self.generator).tolist())

    def __len__(self) -> int:
        return 24


class Files(Dataset[Tensor]):
    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.reads = 0

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        return torch.rand(1)  # augmented at random


class Stream(IterableDataset[int]):
    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, 8))


class Split(tw.Module):
    """Splits its data in setup without a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net, self.seed = nn.Linear(1, 1), seed

    def setup(self, stage: str) -> None:
        self.parts = random_split(NUMBERS, [16, 8], generator=torch.Generator().manual_seed(self.seed))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def train_dataloader(self) -> Any:
        return DataLoader(self.parts[0], 4)

    def val_dataloader(self) -> Any:
        return DataLoader(self.parts[1], 4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def everything(folder: Path) -> dict[str, Any]:
    accelerator = tw.Accelerator(cpu=True)
    rank = accelerator.process_index
    told: dict[str, Any] = {}

    def prepared(name: str, loader: Any) -> Any:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                loader = accelerator.prepare(loader)
                told[name] = [batch.tolist() if isinstance(batch, Tensor) else batch for batch in loader]
            except ValueError as error:
                told[name] = str(error)
        told[f"{name}, said"] = [str(each.message) for each in said]
        return loader

    prepared("own share", DataLoader(NUMBERS, 4, sampler=OwnShare(rank)))
    prepared("declared", DataLoader(range(24), 4, sampler=Declared(rank)))  # type: ignore[arg-type]
    prepared("weighted", DataLoader(NUMBERS, 4, sampler=WeightedRandomSampler([1.0] * 24, 24)))
    sampler = Counted(rank)
    state = torch.get_rng_state(), random.getstate(), sampler.generator.get_state()
    prepared("own generator", DataLoader(NUMBERS, 4, sampler=sampler))
    told["reads"] = sampler.reads
    same = torch.equal(state[0], torch.get_rng_state()) and torch.equal(state[2], sampler.generator.get_state())
    told["state"] = same and state[1] == random.getstate()
    files = Files([f"{number}.png" for number in range(24)])
    prepared("augmented", DataLoader(files, 4))
    told["files"] = files.reads
    told["subset"] = random_split(NUMBERS, [16, 8], generator=torch.Generator().manual_seed(rank))
    prepared("split", DataLoader(told.pop("subset")[0], 4))
    for name, start in (("stream", 0), ("divided stream", rank)):
        prepared(name, DataLoader(Stream(start), 2))
        accelerator.wait_for_everyone()
    trainer = tw.Trainer(max_epochs=1, devices=2, **QUIET)
    try:
        trainer.fit(Split(rank))
    except ValueError as error:
        told["fit"] = str(error)
    tw.Trainer(max_epochs=1, devices=2, **QUIET).fit(Split(0))
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_job(everything, 2, tmp_path_factory.mktemp("job"))


def test_a_sampler_that_divides_the_data_is_rejected_by_name_on_every_rank(told: list[dict[str, Any]]) -> None:
    for each in told:
        assert "the first indices of an OwnShare" in each["own share"]
        assert "set use_distributed_sampler=False (or do not pass its loader to prepare)" in each["own share"]


def test_a_sampler_that_declares_its_rank_is_read_as_it_is(told: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(told):
        assert sorted(index for batch in each["declared"] for index in batch) == list(range(rank, 24, 2))


def test_an_unseeded_split_is_rejected_before_it_is_trained_on(told: list[dict[str, Any]]) -> None:
    for each in told:
        differs = "data differs between rank 0 and rank 1: the indices of the Subset (random_split)"
        assert f"the prepared {differs}" in each["split"]
        assert f"the validation {differs}" in each["fit"]
        assert "call seed_everything, or pass a seeded generator" in each["fit"]


def test_a_stream_that_divides_itself_is_warned_of_when_it_is_read(told: list[dict[str, Any]]) -> None:
    said = [text for each in told for text in each["divided stream, said"]]
    assert any("the first batch of a Stream" in text and "use_distributed_sampler=False" in text for text in said)
    assert [each["stream, said"] for each in told] == [[], []]
    assert sorted(number for each in told for batch in each["stream"] for number in batch) == list(range(8))


def test_augmentation_and_generators_of_samplers_raise_no_alarm(told: list[dict[str, Any]]) -> None:
    for each in told:
        assert [each[f"{name}, said"] for name in ("weighted", "augmented", "declared")] == [[], [], []]
        assert "the first indices of a Counted" in each["own generator"], "the ranks have different seeds"


def test_the_comparison_reads_no_item_and_draws_nothing(told: list[dict[str, Any]]) -> None:
    for each in told:
        assert each["reads"] == 0
        assert each["files"] == 12, "only this rank's files, in the epoch that was read"
        assert each["state"]
