"""Training and evaluation on two real gloo ranks, started once, beside the same on one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import run_job
from small import ON_HOST, QUIET, Classifier, assert_close, assert_equal, loss_of, make_loader, make_net, weights
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

import trainwright as tw

SAMPLES = 45  # batches of 8: the last round has 5 samples, which two ranks share as 3 and 2
ALONE = 17  # batches of 8: the last round has one sample, so one rank has none
VAL_SAMPLES = 21
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 4},  # 6 global batches: a window of 4 and one of 2
    "clip_norm": {"gradient_clip_val": 0.1},
    "16-mixed": {"precision": "16-mixed"},
    "one left": {"samples": ALONE},
    "one left in a window": {"samples": ALONE, "accumulate_grad_batches": 2},
}


class Measured(Classifier):
    """Logs every kind of value during evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.norm = nn.BatchNorm1d(8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((self.norm(batch[0]), batch[1]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self.net(self.norm(batch[0]))
        self.accuracy(outputs, batch[1])
        losses = nn.functional.cross_entropy(outputs, batch[1], reduction="none")
        self.log("accuracy", self.accuracy)
        self.log("loss", losses.mean())
        self.log("count", len(losses), reduce_fx="sum")
        self.log("worst", losses.max(), reduce_fx="max")
        self.log("best", losses.min(), reduce_fx="min")


def train(batch_size: int, samples: int = SAMPLES, **settings: Any) -> dict[str, Tensor]:
    module = Classifier()
    trainer = tw.Trainer(max_epochs=2, **{**QUIET, **settings})
    trainer.fit(module, make_loader(samples, batch_size))
    loss = trainer.callback_metrics["loss_epoch"]
    return {**weights(module), "steps": torch.tensor(trainer.global_step), "loss": loss}


def evaluate(samples: int) -> dict[str, float]:
    torch.manual_seed(1 + int(dist.is_initialized() and dist.get_rank()))  # rank 0's weights are the ones that count
    return tw.Trainer(**QUIET).validate(Measured(), make_loader(samples, 4))[0]


def train_by_accelerator(batch_size: int) -> tuple[dict[str, Tensor], list[int]]:
    accelerator = tw.Accelerator(cpu=ON_HOST, gradient_accumulation_steps=2)
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    model, optimizer, loader, val_loader = accelerator.prepare(
        net, optimizer, make_loader(40, batch_size), make_loader(VAL_SAMPLES, 4)
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    gathered = [accelerator.gather_for_metrics({"target": batch[1]})["target"] for batch in val_loader]
    return weights(net), torch.cat(gathered).tolist()


def train_in_both_loops() -> list[dict[str, Tensor]]:
    """Train two windows of three batches; the ranks have 3 and 2 samples in the last of them."""
    module, net = Classifier(), make_net()
    tw.Trainer(max_epochs=1, accumulate_grad_batches=3, **QUIET).fit(module, make_loader(SAMPLES, 4))
    accelerator = tw.Accelerator(cpu=ON_HOST, gradient_accumulation_steps=3)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.05), make_loader(SAMPLES, 4)
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return [weights(module.net), weights(net)]


def collectives_per_batch() -> int:
    """Count the calls of the process group from Python while batches are trained. DDP's buckets are in C++."""
    calls: list[str] = []
    kept = {
        name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object")
    }

    class Count(tw.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            for name, function in kept.items():
                setattr(dist, name, lambda *a, n=name, f=function, **k: (calls.append(n), f(*a, **k))[1])

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.counted = len(calls)

    count = Count()
    try:
        tw.Trainer(max_epochs=1, callbacks=[count], **QUIET).fit(Classifier(), make_loader(SAMPLES, 4))
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
    return count.counted


def lazy_classifier() -> Classifier:
    module = Classifier()
    with warnings.catch_warnings(action="ignore"):
        module.net = nn.Sequential(nn.LazyLinear(3))
    return module


def refusals() -> list[str]:
    """Return the errors on both ranks. The job continues after them."""
    told = []
    for call in (
        lambda: tw.Trainer(devices=3, **QUIET),
        lambda: tw.Trainer(strategy="single_device", **QUIET),
        lambda: tw.Trainer(**QUIET).fit(Classifier(), make_loader(5, 4, drop_last=True)),
        lambda: tw.Trainer(**QUIET).fit(Classifier(), make_loader(44 + 8 * dist.get_rank())),
        lambda: tw.Trainer(**QUIET).fit(Classifier(), [1, 2]),
        lambda: tw.Trainer(max_epochs=1, **QUIET).fit(Classifier(), make_loader(), ckpt_path="nowhere.ckpt"),
        lambda: tw.Trainer(max_epochs=1, **QUIET).fit(lazy_classifier(), make_loader()),
        lambda: tw.Trainer(**QUIET).validate(lazy_classifier(), make_loader()),
        lambda: tw.Accelerator(cpu=ON_HOST).prepare(torch.optim.SGD(make_net().parameters(), lr=0.1)),
    ):
        with pytest.raises((ValueError, TypeError, tw.CheckpointError)) as caught:
            call()
        told.append(str(caught.value))
    return told


def one_validation_batch() -> list[float]:
    """Two validations and two tests of one batch. Rank 1 has no batch, and takes part in all of them."""
    seen: list[float] = []
    watch = tw.LambdaCallback(
        on_validation_end=lambda trainer, *_: seen.append(float(trainer.callback_metrics.get("accuracy", -1.0)))
    )
    torch.manual_seed(1)
    module = Measured()
    trainer = tw.Trainer(max_epochs=2, callbacks=[watch], **QUIET)
    trainer.fit(module, make_loader(SAMPLES, 4), make_loader(3, 4))
    seen += [trainer.test(module, make_loader(3, 4))[0]["accuracy"] for _ in range(2)]
    return seen


def job(folder: Path) -> dict[str, Any]:
    return {
        **{name: train(4, **settings) for name, settings in CASES.items()},
        "evaluated": {samples: evaluate(samples) for samples in (VAL_SAMPLES, 3)},
        "accelerator": train_by_accelerator(4),
        "loops": train_in_both_loops(),
        "one_batch": one_validation_batch(),
        "collectives": collectives_per_batch(),
        "refusals": refusals(),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_job(job, 2, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process_on_the_same_global_batch(results: list[dict[str, Any]], name: str) -> None:
    assert_equal(results[0][name], results[1][name])
    assert_close(results[0][name], train(8, **CASES[name]), 1e-3 if "16" in name else 1e-6)


@pytest.mark.parametrize("samples", [VAL_SAMPLES, 3])
def test_evaluation_counts_each_sample_once(results: list[dict[str, Any]], samples: int) -> None:
    """3 samples are one batch, so rank 1 has none, and still takes part."""
    assert results[0]["evaluated"][samples] == results[1]["evaluated"][samples]
    assert results[0]["evaluated"][samples]["count"] == samples
    assert results[0]["evaluated"][samples] == pytest.approx(evaluate(samples), abs=1e-6)


def test_accelerator_trains_alike_and_gathers_each_sample_once(results: list[dict[str, Any]]) -> None:
    trained, gathered = results[0]["accelerator"]
    assert_equal(trained, results[1]["accelerator"][0])
    alone, targets = train_by_accelerator(8)
    assert_close(trained, alone)
    assert gathered == results[1]["accelerator"][1] == targets
    assert len(gathered) == VAL_SAMPLES


def test_both_loops_train_bitwise_alike_in_a_window_with_an_uneven_round(results: list[dict[str, Any]]) -> None:
    for result in results:
        by_trainer, by_accelerator = result["loops"]
        assert_equal(by_trainer, by_accelerator)


def test_a_batch_adds_no_collective(results: list[dict[str, Any]]) -> None:
    assert [result["collectives"] for result in results] == [0, 0]


def test_refusals_are_alike_on_both_ranks_and_name_the_remedy(results: list[dict[str, Any]]) -> None:
    assert results[0]["refusals"] == results[1]["refusals"]
    devices, strategy, samples, lengths, loader, checkpoint, lazy, evaluated, strangers = results[0]["refusals"]
    assert "launched with 2 processes" in devices
    assert "such as 'ddp'" in strategy
    assert "1 batches for 2 ranks, and drop_last drops a short round" in samples
    assert "different lengths across ranks (6, 7 batches)" in lengths
    assert "Pass a torch DataLoader" in loader
    assert "nowhere.ckpt" in checkpoint
    assert "'net.0.weight' of Classifier is lazy" in lazy
    assert lazy == evaluated
    assert "Pass the models and their optimizers to prepare in one call" in strangers


def test_a_validation_of_one_batch_is_no_trap(results: list[dict[str, Any]]) -> None:
    assert results[0]["one_batch"] == results[1]["one_batch"]
    assert len(results[0]["one_batch"]) == 5
