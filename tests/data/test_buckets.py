"""Length buckets, on ranks and in resumed runs. The epochs differ in their numbers of batches."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, assert_equal, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainwright as tw

LENGTHS = random.Random(3).choices(range(1, 60), k=203)
DATA = [torch.full((length,), index) for index, length in enumerate(LENGTHS)]


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=tw.LengthBucketSampler(LENGTHS, **options), collate_fn=tw.PadCollate(-1))  # type: ignore[arg-type]


class Recording(tw.Module):
    """Records the samples of the batches that count, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.epochs: list[list[list[int]]] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.trainer.is_dummy_batch:
            self.epochs[-1].append(batch[:, 0].tolist())
        return self.net(batch[:, :1] / len(DATA)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(folder: Path, devices: int, **settings: Any) -> tuple[Recording, tw.Trainer]:
    tw.seed_everything(5, verbose=False)
    module = Recording()
    resumed = settings.pop("ckpt_path", None)
    trainer = tw.Trainer(**{**QUIET, "max_epochs": 3, "devices": devices, "default_root_dir": folder, **settings})
    trainer.fit(module, loader(max_tokens=300), ckpt_path=resumed)
    return module, trainer


def on_ranks(folder: Path) -> dict[str, Any]:
    devices = int(os.environ["WORLD_SIZE"])
    whole, trainer = fit(folder, devices)
    sampler, rounds = tw.LengthBucketSampler(LENGTHS, max_tokens=300), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        rounds.append(-(-len(sampler) // devices))
    cut = sum(rounds) - 1  # before the last batch of epoch 1
    first, stopped = fit(folder, devices, max_steps=cut, enable_checkpointing=False)
    stopped.save_checkpoint(folder / "cut.ckpt")
    second, _ = fit(folder, devices, ckpt_path=folder / "cut.ckpt")
    assert_equal(weights(second), weights(whole))
    seen = [first.epochs[0], first.epochs[1] + second.epochs[0], second.epochs[1]]
    assert seen == whole.epochs
    return {"epochs": whole.epochs, "padding": float(trainer.callback_metrics["padding_share"])}


@pytest.mark.parametrize(
    "options", [{"batch_size": 12}, {"batch_size": 12, "drop_last": True}, {"max_tokens": 300}], ids=str
)
def test_batches_contain_similar_lengths_and_all_samples(options: dict[str, Any]) -> None:
    sampler = tw.LengthBucketSampler(LENGTHS, **options)
    orders, shares = [], []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert batches == list(sampler)
        assert len(sampler) == len(batches)
        samples = [index for batch in batches for index in batch]
        assert (
            len(set(samples)) == len(samples) == (len(LENGTHS) // 12 * 12 if "drop_last" in options else len(LENGTHS))
        )
        tokens = [len(batch) * max(LENGTHS[index] for index in batch) for batch in batches]
        share = 1 - sum(LENGTHS[index] for index in samples) / sum(tokens)
        assert sampler.padding_share == pytest.approx(share)
        assert tokens[0] == max(tokens), "the batch with the most tokens comes first"
        if "max_tokens" in options:
            assert max(tokens) <= 300
        else:
            assert {len(batch) for batch in batches[:-1]} == {12}, "a short batch comes last"
        orders.append(samples)
        shares.append(share)
    assert max(shares) < 0.25, "batches in random order have a share of a half"
    assert all(orders[0] != order for order in orders[1:])
    again = tw.LengthBucketSampler(LENGTHS, **options)
    again.set_epoch(3)
    assert list(again) == batches, "seed and epoch determine the order"
    assert list(tw.LengthBucketSampler(LENGTHS, seed=1, **options)) != list(tw.LengthBucketSampler(LENGTHS, **options))


def test_a_short_dataset_has_different_batches_in_every_epoch() -> None:
    sampler = tw.LengthBucketSampler(LENGTHS[:80], batch_size=10)
    groups = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        groups.append({frozenset(batch) for batch in sampler})
    assert not groups[0] & groups[1] & groups[2]


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_have_the_batches_of_one_and_resume_exactly(ranks: int, tmp_path: Path) -> None:
    alone, trainer = fit(tmp_path, 1)
    lengths = [len(epoch) for epoch in alone.epochs]
    assert len(set(lengths)) > 1, "the epochs of this test differ in their lengths"
    results = run_job(on_ranks, ranks, tmp_path / "job")
    for epoch, batches in enumerate(alone.epochs):
        parts = [result["epochs"][epoch] for result in results]
        rounds = [part[number] for number in range(len(parts[0])) for part in parts if number < len(part)]
        assert rounds == batches, "rank r has every N-th batch of one process"
    sampler = tw.LengthBucketSampler(LENGTHS, max_tokens=300)
    sampler.set_epoch(2)
    for share in (float(trainer.callback_metrics["padding_share"]), *(result["padding"] for result in results)):
        assert share == pytest.approx(sampler.padding_share)


def test_an_accelerator_resumes_within_an_epoch(tmp_path: Path) -> None:
    def run(stop: int | None, resumes: bool) -> list[list[int]]:
        tw.set_seed(5)
        accelerator = tw.Accelerator(cpu=QUIET["accelerator"] == "cpu")
        batches = accelerator.prepare(loader(max_tokens=300))
        accelerator.prepare(nn.Linear(1, 1))
        seen: list[list[int]] = []
        if resumes:
            accelerator.load_state(tmp_path / "state")
        for _ in range(batches.epoch, 3):
            for batch in batches:
                seen.append(batch[:, 0].tolist())
                if len(seen) == stop:
                    accelerator.save_state(tmp_path / "state")
                    return seen
        return seen

    whole = run(None, False)
    sampler = tw.LengthBucketSampler(LENGTHS, max_tokens=300)
    stop = len(sampler) + 10
    assert run(stop, False) + run(None, True) == whole
    assert whole[: len(sampler)] == list(sampler)


@pytest.mark.parametrize(("options", "error", "text"), [
    ({"lengths": None}, TypeError, "lengths is a NoneType"),
    ({"lengths": [1.5, 2]}, TypeError, "as integers: 'float'"),
    ({"lengths": ["a text"]}, TypeError, "as integers: 'str'"),
    ({"lengths": []}, ValueError, "at least one sample"),
    ({"lengths": [3, -1]}, ValueError, "none below 0"),
    ({"batch_size": None}, ValueError, "batch_size=None and max_tokens=None: pass exactly one of them"),
    ({"max_tokens": 9}, ValueError, "batch_size=2 and max_tokens=9: pass exactly one of them"),
    ({"batch_size": None, "max_tokens": 5}, ValueError, "sample 1 has 7 tokens, more than max_tokens=5"),
    ({"batch_size": 0}, ValueError, "batch_size=0: expected an integer of at least 1"),
    ({"batch_size": 2.0}, TypeError, "batch_size=2.0: expected an integer of at least 1"),
    ({"bucket_batches": 0}, ValueError, "bucket_batches=0"),
    ({"seed": "a"}, TypeError, "seed='a': expected an integer of at least 0"),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        tw.LengthBucketSampler(**{"lengths": [3, 7, 4], "batch_size": 2, **options})


def test_lengths_of_another_dataset_are_an_error() -> None:
    wrong = DataLoader(DATA, batch_sampler=tw.LengthBucketSampler(LENGTHS[1:], batch_size=4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has 202 lengths, but the loader's dataset has 203 samples"):
        tw.Trainer(max_epochs=1, **QUIET).fit(Recording(), wrong)
    as_sampler: DataLoader[Any] = DataLoader(DATA, sampler=tw.LengthBucketSampler(LENGTHS, batch_size=4))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="LengthBucketSampler returns batches: pass it as DataLoader"):
        tw.Trainer(max_epochs=1, **QUIET).fit(Recording(), as_sampler)
