"""A WeightedRandomSampler on two ranks: the ranks divide the draws of one process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import trainwright as tw

COUNT, RARE, DRAWS, BATCH = 40, 4, 38, 4
DATA = TensorDataset(torch.arange(float(COUNT))[:, None])
BALANCED = [9.0] * RARE + [1.0] * (COUNT - RARE)
"""The rare class has the first samples. The weights draw it in half of the cases."""
WITHOUT_EVEN = [1.0, 0.0] * (COUNT // 2)


class Recording(tw.Module):
    """Records the samples of every epoch's batches that count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.epochs: list[list[list[int]]] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.trainer.is_dummy_batch:
            self.epochs[-1].append([int(number) for number in batch[0]])
        return self.net(batch[0] / COUNT).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samplers() -> dict[str, WeightedRandomSampler]:
    return {
        "balanced": WeightedRandomSampler(BALANCED, DRAWS),
        "without replacement": WeightedRandomSampler(BALANCED, DRAWS, replacement=False),
        "a generator": WeightedRandomSampler(BALANCED, DRAWS, generator=torch.Generator().manual_seed(2)),
        "a zero weight": WeightedRandomSampler(WITHOUT_EVEN, DRAWS),
    }


def epochs_of(devices: int) -> dict[str, list[list[list[int]]]]:
    """Return the samples of two epochs with every sampler, in global batches of the same size."""
    epochs = {}
    for name, sampler in samplers().items():
        tw.seed_everything(5, verbose=False)
        module = Recording()
        trainer = tw.Trainer(max_epochs=2, devices=devices, **QUIET)
        trainer.fit(module, DataLoader(DATA, BATCH * 2 // devices, sampler=sampler))
        epochs[name] = module.epochs
    return epochs


def on_two_ranks(folder: Path) -> dict[str, Any]:
    return epochs_of(2)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[list[list[int]]]]]:
    return run_job(on_two_ranks, 2, tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("name", list(samplers()))
def test_two_ranks_divide_the_weighted_draws_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    alone = epochs_of(1)[name]
    for epoch in range(2):
        first, second = (rank[name][epoch] for rank in ranks)
        assert len(first) == len(second) == len(alone[epoch]) == 5, "every rank makes the steps of one process"
        assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [sorted(batch) for batch in alone[epoch]]
        assert first != second
    assert alone[0] != alone[1], "every epoch has other draws"


def test_weights_hold_over_the_ranks_together(ranks: list[dict[str, Any]]) -> None:
    def drawn(name: str) -> list[int]:
        return [number for rank in ranks for epoch in rank[name] for batch in epoch for number in batch]

    assert 0.4 < sum(number < RARE for number in drawn("balanced")) / (2 * DRAWS) < 0.6
    assert all(number % 2 == 0 for number in drawn("a zero weight"))
    assert max(Counter(drawn("without replacement")).values()) == 2, "once in each of two epochs"
