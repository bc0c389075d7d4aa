"""A run that stops and resumes is bitwise the uninterrupted run, on one process and on three ranks."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import run_job
from small import QUIET, SAVING, Classifier, assert_equal, fit, loss_of, make_loader, weights
from torch import Tensor, nn

import trainwright as tw
from trainwright.strategies.ddp.strategy import DDPStrategy

KINDS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),  # it has no state at all
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
    "fused_adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
}


class Noisy(Classifier):
    """Draws from every generator in its step, and has a scheduler."""

    def __init__(self, kind: str = "adamw") -> None:
        super().__init__(dropout=0.4)
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = torch.randn_like(batch[0]) + random.random() + float(np.random.rand())
        loss = loss_of(self.net, (batch[0] + 0.1 * noise, batch[1]))
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = KINDS[self.kind](self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


def run(folder: Path, epochs: int, *, kind: str = "adamw", ckpt_path: str | None = None, **settings: Any) -> Any:
    tw.seed_everything(3)
    callback = tw.ModelCheckpoint(str(folder), save_top_k=-1)
    module = Noisy(kind)
    trainer = tw.Trainer(max_epochs=epochs, callbacks=[callback], **{**SAVING, **settings})
    trainer.fit(module, make_loader(45, 4, shuffle=True), make_loader(10, 4), ckpt_path=ckpt_path)
    return {**weights(module), **optimizer_state(trainer)}, trainer


def optimizer_state(trainer: tw.Trainer) -> dict[str, Tensor]:
    state = trainer.optimizers[0].state_dict()["state"]
    return {f"{i}/{key}": torch.as_tensor(value) for i, each in state.items() for key, value in each.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact_for_every_kind_of_optimizer(tmp_path: Path, kind: str) -> None:
    whole, uninterrupted = run(tmp_path / "whole", 4, kind=kind)
    run(tmp_path / "part", 2, kind=kind)
    resumed, trainer = run(tmp_path / "part", 4, kind=kind, ckpt_path="last")
    assert_equal(resumed, whole)
    is_fused, was_fused = (each.optimizers[0].param_groups[0].get("fused") for each in (trainer, uninterrupted))
    assert is_fused == was_fused


@pytest.mark.parametrize(
    "settings", [{"precision": "16-mixed"}, {"accumulate_grad_batches": 5}], ids=["16-mixed", "windows"]
)
def test_resume_is_exact_with_a_scaler_and_with_windows(tmp_path: Path, settings: dict[str, Any]) -> None:
    whole, _ = run(tmp_path / "whole", 3, **settings)
    run(tmp_path / "part", 1, **settings)
    run(tmp_path / "part", 2, ckpt_path="last", **settings)
    resumed, trainer = run(tmp_path / "part", 3, ckpt_path="last", **settings)
    assert_equal(resumed, whole)
    assert [Path(path).name for path in trainer.checkpoint_callback.state_dict()["best_k_models"]] == [
        f"epoch={epoch}-step={trainer.global_step // 3 * (epoch + 1)}.ckpt" for epoch in range(3)
    ]


def test_the_order_of_the_data_is_the_saved_runs_whatever_seed_the_process_has(tmp_path: Path) -> None:
    def train(epochs: int, seed: int, name: str, ckpt_path: str | None = None) -> dict[str, Tensor]:
        callback = tw.ModelCheckpoint(str(tmp_path / name))
        trainer = tw.Trainer(max_epochs=epochs, callbacks=[callback], **SAVING)
        module = Classifier()
        tw.seed_everything(seed)  # after the Trainer was made: it counts all the same
        trainer.fit(module, make_loader(45, 4, shuffle=True), ckpt_path=ckpt_path)
        return weights(module)

    whole = train(3, 1, "whole")
    train(1, 1, "part")
    assert_equal(train(3, 2, "part", "last"), whole)
    assert not torch.equal(train(3, 2, "other")["net.0.weight"], whole["net.0.weight"])


def test_a_save_needs_a_run(tmp_path: Path) -> None:
    trainer = tw.Trainer(**QUIET)
    with pytest.raises(RuntimeError, match="nothing to save"):
        trainer.save_checkpoint(str(tmp_path / "x.ckpt"))
    trainer.test(Classifier(), make_loader())
    with pytest.raises(RuntimeError, match=r"no optimizer to save\. Pass weights_only=True"):
        trainer.save_checkpoint(str(tmp_path / "x.ckpt"))
    assert trainer.save_checkpoint(str(tmp_path / "x.ckpt"), weights_only=True)


@pytest.mark.parametrize(
    ("first", "then"), [("bf16-true", "32-true"), ("32-true", "64-true"), ("64-true", "bf16-mixed")]
)
def test_a_run_goes_on_in_another_precision(tmp_path: Path, first: str, then: str) -> None:
    """The state of the optimizer follows the dtype of its parameters, one without dimensions among them."""

    class Scaled(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.0))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * self.scale

    path = str(tmp_path / "run.ckpt")
    trainer = fit(Scaled(), precision=first)
    trainer.save_checkpoint(path)
    resumed = tw.Trainer(max_epochs=2, precision=then, **QUIET)
    module = Scaled()
    resumed.fit(module, make_loader(), ckpt_path=path)
    assert resumed.global_step == 22
    for parameter, state in resumed.optimizers[0].state.items():
        assert state["exp_avg"].dtype == parameter.dtype
        assert state["step"].dtype == torch.float32


def test_a_position_beyond_the_loader_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    trainer = tw.Trainer(max_steps=7, **QUIET)
    trainer.fit(Classifier(), make_loader())
    trainer.save_checkpoint(path)
    with pytest.raises(
        ValueError, match=r"was saved after batch 7 of its epoch, .* has 6 batches\. Resume with the data"
    ):
        tw.Trainer(max_epochs=2, **QUIET).fit(Classifier(), make_loader(24), ckpt_path=path)


def test_saving_after_a_test_is_saving_after_the_fit(tmp_path: Path) -> None:
    module = Classifier()
    trainer = fit(module)
    trainer.test(module, make_loader())
    assert trainer.save_checkpoint(str(tmp_path / "run.ckpt"))
    resumed, whole = Classifier(), Classifier()
    tw.Trainer(max_epochs=2, **QUIET).fit(resumed, make_loader(), ckpt_path=str(tmp_path / "run.ckpt"))
    tw.Trainer(max_epochs=2, **QUIET).fit(whole, make_loader())
    assert_equal(weights(resumed), weights(whole))


def test_a_scheduler_that_counts_its_milestones_goes_on(tmp_path: Path) -> None:
    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            parts = [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),
                torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 2]),
            ]
            return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])]

    def rates(epochs: int, path: Path | None = None) -> tuple[tw.Trainer, float]:
        trainer = tw.Trainer(max_epochs=epochs, **QUIET)
        with warnings.catch_warnings(action="ignore"):  # SequentialLR steps its parts in torch's older way
            trainer.fit(Scheduled(), make_loader(4), ckpt_path=path)
        return trainer, trainer.optimizers[0].param_groups[0]["lr"]

    rates(1)[0].save_checkpoint(tmp_path / "first.ckpt")
    assert rates(5, tmp_path / "first.ckpt")[1] == rates(5)[1]


class Reordered(tw.Module):
    """Its layers are used in another order than they were made in, so that DDP rebuilds its buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.last, self.first, self.middle = nn.Linear(37, 3), nn.Linear(8, 29), nn.Linear(29, 37)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        net = nn.Sequential(self.first, nn.Tanh(), nn.Dropout(0.2), self.middle, nn.Tanh(), self.last)
        return loss_of(net, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def job(folder: Path) -> dict[str, Any]:
    def run(epochs: int, name: str, ckpt_path: str | None = None) -> dict[str, Tensor]:
        tw.seed_everything(4)
        callback = tw.ModelCheckpoint(str(folder / name), save_top_k=-1)
        strategy = DDPStrategy(
            bucket_cap_mb=0.0002
        )  # else a model of many megabytes would be needed for several buckets
        trainer = tw.Trainer(max_epochs=epochs, callbacks=callback, strategy=strategy, **SAVING)
        module = Reordered()
        trainer.fit(module, make_loader(50, 4, shuffle=True), ckpt_path=ckpt_path)
        (wrapper,) = strategy.wrapped.values()
        sizes = wrapper._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
        assert len(sizes) > 2, "the order of the buckets is what has to be kept"
        return weights(module)

    whole = run(4, "whole")
    run(1, "part")
    run(3, "part", "last")
    return {"whole": whole, "resumed": run(4, "part", "last")}


@pytest.mark.slow
def test_a_run_resumed_twice_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    results = run_job(job, 3, tmp_path)
    for result in results:
        assert_equal(result["resumed"], result["whole"])
        assert_equal(result["whole"], results[0]["whole"])


class Counting(torch.optim.Optimizer):
    """Makes a parameter's state where it has none, as `in` tells it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    if parameter not in self.state:
                        self.state[parameter] = {"count": torch.zeros(())}
                    self.state[parameter]["count"] += 1
                    parameter.sub_(0.1 / self.state[parameter]["count"] * parameter.grad)
        return loss


def test_a_parameter_without_optimizer_state_has_none_in_a_resumed_run(tmp_path: Path) -> None:
    class Thawed(Classifier):
        def on_train_epoch_start(self) -> None:
            self.net[-1].requires_grad_(self.trainer.current_epoch > 0)

        def configure_optimizers(self) -> Any:
            return Counting(self.parameters())

    def train(folder: str, epochs: int, ckpt_path: str | None = None) -> dict[str, Tensor]:
        module = Thawed()
        saver = tw.ModelCheckpoint(str(tmp_path / folder))
        trainer = tw.Trainer(max_epochs=epochs, callbacks=saver, **SAVING)
        trainer.fit(module, make_loader(12, 4), ckpt_path=ckpt_path)
        return {**weights(module), **optimizer_state(trainer)}

    torch.manual_seed(2)
    whole = train("whole", 2)
    torch.manual_seed(2)
    train("part", 1)
    assert_equal(train("part", 2, "last"), whole)
