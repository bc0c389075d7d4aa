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

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
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


class Gan(tw.Module):
    """Two optimizers, stepped by hand, for two losses of different parameters."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        fake = self.generator(batch[0])
        critic.zero_grad()
        self.manual_backward(self.critic(fake.detach()).mean() - self.critic(batch[0]).mean())
        critic.step()
        generator.zero_grad()
        self.manual_backward(-self.critic(fake).mean() + fake.square().mean())
        generator.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.generator.parameters(), 0.01), torch.optim.Adam(self.critic.parameters(), 0.01)]


def train(batch_size: int, samples: int = SAMPLES, **settings: Any) -> dict[str, Tensor]:
    module = Classifier()
    trainer = tw.Trainer(max_epochs=2, **{**QUIET, **settings})
    trainer.fit(module, make_loader(samples, batch_size))
    loss = trainer.callback_metrics["loss_epoch"]
    return {**weights(module), "steps": torch.tensor(trainer.global_step), "loss": loss}


def train_gan(batch_size: int) -> dict[str, Tensor]:
    module = Gan()
    tw.Trainer(max_epochs=2, **QUIET).fit(module, make_loader(40, batch_size))
    return weights(module)


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


def checkpoints(folder: Path) -> dict[str, Any]:
    """Return the results of a run that is saved, of its resumption, and of an uninterrupted run."""
    settings = {**QUIET, "enable_checkpointing": True, "logger": tw.CSVLogger(str(folder))}

    def run(epochs: int, name: str = "resumed", **fit: Any) -> tuple[dict[str, Tensor], tw.Trainer]:
        torch.manual_seed(11)
        callback = tw.ModelCheckpoint(str(folder / name), monitor="loss_epoch", save_top_k=1, save_last=True)
        trainer = tw.Trainer(max_epochs=epochs, callbacks=[callback], **settings)
        module = Measured(dropout=0.3)
        trainer.fit(module, make_loader(SAMPLES, 4, shuffle=True), make_loader(VAL_SAMPLES, 4), **fit)
        return weights(module), trainer

    whole, _ = run(4, "whole")
    run(2)
    resumed, trainer = run(4, ckpt_path="last")
    callback = trainer.checkpoint_callback
    assert callback is not None
    tested = trainer.test(Measured(), make_loader(VAL_SAMPLES, 4), ckpt_path="best")
    return {
        "whole": whole,
        "resumed": resumed,
        "epoch": trainer.current_epoch,
        "best": callback.best_model_path,
        "last": callback.last_model_path,
        "tested": tested,
        "rows": Path(str(trainer.log_dir), "metrics.csv").read_text().count("\n"),
    }


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

    class Watch(tw.Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            seen.append(float(trainer.callback_metrics.get("accuracy", -1.0)))

    torch.manual_seed(1)
    module = Measured()
    trainer = tw.Trainer(max_epochs=2, callbacks=[Watch()], **QUIET)
    trainer.fit(module, make_loader(SAMPLES, 4), make_loader(3, 4))
    seen += [trainer.test(module, make_loader(3, 4))[0]["accuracy"] for _ in range(2)]
    return seen


def job(folder: Path) -> dict[str, Any]:
    return {
        **{name: train(4, **settings) for name, settings in CASES.items()},
        "gan": train_gan(4),
        "evaluated": {samples: evaluate(samples) for samples in (VAL_SAMPLES, 3)},
        "accelerator": train_by_accelerator(4),
        "loops": train_in_both_loops(),
        "one_batch": one_validation_batch(),
        "checkpoints": checkpoints(folder),
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


def test_manual_optimization_has_averaged_gradients_from_the_first_step(
    results: list[dict[str, Any]],
) -> None:
    assert_equal(results[0]["gan"], results[1]["gan"])
    assert_close(results[0]["gan"], train_gan(8))


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


def test_a_run_resumed_at_an_epochs_end_is_bitwise_the_uninterrupted_one(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert_equal(result["checkpoints"]["resumed"], result["checkpoints"]["whole"])
        assert result["checkpoints"]["epoch"] == 4
    for key in ("best", "last", "tested"):
        assert results[0]["checkpoints"][key] == results[1]["checkpoints"][key]
    assert results[0]["checkpoints"]["tested"][0]["count"] == VAL_SAMPLES


def test_a_checkpoint_of_two_ranks_is_read_by_one(results: list[dict[str, Any]]) -> None:
    saved = results[0]["checkpoints"]
    assert len(list(Path(saved["last"]).glob("model-*.safetensors"))) == 2
    module = Measured()
    tested = tw.Trainer(**QUIET).test(module, make_loader(VAL_SAMPLES, 4), ckpt_path=saved["best"])
    assert tested[0] == pytest.approx(saved["tested"][0], abs=1e-6)
    trainer = tw.Trainer(max_epochs=5, **QUIET)
    trainer.fit(module, make_loader(SAMPLES, 8), ckpt_path=saved["last"])
    assert trainer.current_epoch == 5


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
