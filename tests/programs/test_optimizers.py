"""Optimizers and averages of others: schedule-free ones, which are told when to train, Lion, and torch-ema in a module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import run_job
from resumed import check_resume
from small import ON_HOST, QUIET, Classifier, assert_close, assert_equal, loss_of, make_loader, make_net, weights
from torch import Tensor

import trainwright as tw

pytestmark = pytest.mark.slow

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "ddp_sharded": lambda: "ddp_sharded",
    "deepspeed": lambda: tw.DeepSpeedStrategy(elementwise=True),
    "fsdp": lambda: tw.FSDPStrategy(elementwise=True),
}


class ScheduleFree(Classifier):
    def __init__(self, of_trainer: bool = False) -> None:
        super().__init__()
        self.of_trainer = of_trainer

    def configure_optimizers(self) -> Any:
        import schedulefree

        return schedulefree.AdamWScheduleFree(self.parameters(), lr=0.02, warmup_steps=3, foreach=False)

    @property
    def own(self) -> Any:
        return self.trainer.optimizers[0] if self.of_trainer else self.optimizers()

    def on_train_epoch_start(self) -> None:
        self.own.train()

    def on_validation_start(self) -> None:
        self.own.eval()

    def on_validation_end(self) -> None:
        self.own.train()

    def on_train_end(self) -> None:
        self.own.eval()


def schedule_free_by_hand(epochs: int = 2) -> dict[str, Tensor]:
    import schedulefree

    net = make_net()
    optimizer = schedulefree.AdamWScheduleFree(net.parameters(), lr=0.02, warmup_steps=3, foreach=False)
    optimizer.train()
    for _ in range(epochs):
        for batch in make_loader(40):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
    optimizer.eval()
    return {f"net.{name}": each for name, each in weights(net).items()}


def schedule_free(folder: Path, strategy: str, batch_size: int) -> dict[str, Any]:
    return {
        str(of_trainer): check_resume(
            lambda of_trainer=of_trainer: ScheduleFree(of_trainer),  # type: ignore[misc]
            lambda: make_loader(40, batch_size),
            folder / f"{strategy}-{of_trainer}.ckpt",
            strategy=STRATEGIES[strategy]() if strategy in STRATEGIES else strategy,
        )
        for of_trainer in (False, True)
    }


def raw_schedule_free(batch_size: int) -> dict[str, Tensor]:
    import schedulefree

    accelerator = tw.Accelerator(cpu=ON_HOST)
    net = make_net()
    optimizer = schedulefree.AdamWScheduleFree(net.parameters(), lr=0.02, warmup_steps=3, foreach=False)
    model, optimizer, loader = accelerator.prepare(net, optimizer, make_loader(40, batch_size))
    optimizer.train()
    for _ in range(2):
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    optimizer.eval()
    return {f"net.{name}": each for name, each in weights(model).items()}


def schedule_free_on_two_ranks(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {name: schedule_free(folder, name, 2) for name in ("ddp", "fsdp", "deepspeed")}
    found["raw"] = {"loop": raw_schedule_free(2)}
    return found


def test_schedule_free_is_evaluated_at_its_average(tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    expected = schedule_free_by_hand()
    for each in schedule_free(tmp_path, "auto", 4).values():
        assert_equal(each, expected)
    assert_equal(raw_schedule_free(4), expected)
    found, _ = run_job(schedule_free_on_two_ranks, 2, tmp_path / "job")
    for way, ends in found.items():
        assert ends, way
        for each in ends.values():
            assert_close(each, expected, 1e-4)


class WithLion(Classifier):
    def configure_optimizers(self) -> Any:
        import lion_pytorch

        return lion_pytorch.Lion(self.parameters(), lr=0.003, weight_decay=0.01)


def lion_on_two_ranks(folder: Path) -> dict[str, Any]:
    return {
        name: check_resume(WithLion, lambda: make_loader(40, 2), folder / f"{name}.ckpt", strategy=make())
        for name, make in STRATEGIES.items()
    }


def test_lion_resumes_under_the_strategies(tmp_path: Path) -> None:
    lion_pytorch = pytest.importorskip("lion_pytorch")
    by_hand = Classifier()
    optimizer = lion_pytorch.Lion(by_hand.parameters(), lr=0.003, weight_decay=0.01)
    for _ in range(2):
        for batch in make_loader(40):
            optimizer.zero_grad()
            loss_of(by_hand.net, batch).backward()
            optimizer.step()
    alone = check_resume(WithLion, lambda: make_loader(40), tmp_path / "alone.ckpt")
    assert_equal(alone, weights(by_hand))
    found, _ = run_job(lion_on_two_ranks, 2, tmp_path / "job")
    for name in STRATEGIES:
        assert_close(found[name], alone, 1e-5)


class Averaged(Classifier):
    """Has an average of torch-ema that is updated after a step, validated with, and stored in hooks."""

    def on_fit_start(self) -> None:
        import torch_ema

        self.ema = torch_ema.ExponentialMovingAverage(self.parameters(), decay=0.8)
        if stored := getattr(self, "stored", None):
            self.ema.load_state_dict(stored)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ema.update()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with self.ema.average_parameters():
            super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ema"] = self.ema.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.stored = checkpoint["ema"]


class Shown(Averaged):
    """Ends with the average in its weights, so that a comparison sees it."""

    def on_train_end(self) -> None:
        self.ema.copy_to()


def averaged_on_two_ranks(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ddp": check_resume(Shown, lambda: make_loader(40, 2), folder / "ddp.ckpt", strategy="ddp")
    }
    trainer = tw.Trainer(max_epochs=1, **{**QUIET, "devices": "auto", "strategy": "fsdp"})
    trainer.fit(Averaged(), make_loader(40, 2))
    try:
        trainer.save_checkpoint(folder / "fsdp.ckpt")
    except tw.CheckpointError as error:
        found["fsdp"] = str(error)
    return found


def test_an_average_of_torch_ema_is_restored(tmp_path: Path) -> None:
    torch_ema = pytest.importorskip("torch_ema")
    by_hand = Classifier()
    optimizer = by_hand.configure_optimizers()
    average = torch_ema.ExponentialMovingAverage(by_hand.parameters(), decay=0.8)
    for _ in range(2):
        for batch in make_loader(40):
            optimizer.zero_grad()
            loss_of(by_hand.net, batch).backward()
            optimizer.step()
            average.update()
    average.copy_to()
    alone = check_resume(Shown, lambda: make_loader(40), tmp_path / "alone.ckpt")
    assert_close(alone, weights(by_hand))
    found, _ = run_job(averaged_on_two_ranks, 2, tmp_path / "job")
    assert_close(found["ddp"], alone, 1e-5)
    assert "shadow_params[0] is a torch.distributed.tensor.DTensor" in found["fsdp"]
    assert "full_tensor()" in found["fsdp"]
