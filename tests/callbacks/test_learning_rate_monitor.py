"""LearningRateMonitor: the names and the rows of the learning rates."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small import QUIET, SAVING, Classifier, Rows, fit, make_loader
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

import trainwright as tw
from trainwright.callbacks.learning_rate_monitor import LearningRateMonitor
from trainwright.errors import RunStopped


class Tuned(Classifier):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(list(self.parameters()))


class TwoOptimizers(Tuned):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch[0]).sum())
            optimizer.step()


def rows(callback: LearningRateMonitor, module: tw.Module, **settings: Any) -> list[tuple[int, dict[str, float]]]:
    memory = Rows()
    settings = {**QUIET, "logger": memory, "max_epochs": 2, "log_every_n_steps": 4, **settings}
    tw.Trainer(callbacks=[callback], **settings).fit(module, make_loader())
    rates = [(step, {name: value for name, value in row.items() if "loss" not in name}) for step, row in memory.rows]
    return [(step, row) for step, row in rates if len(row) > 1]


def test_monitor_writes_epoch_and_step_rows() -> None:
    def by_epoch(parameters: Any) -> Any:
        optimizer = AdamW(parameters, lr=1.0)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]

    def by_step(parameters: Any) -> Any:
        optimizer = AdamW(parameters, lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 4, 0.5), "interval": "step"}}

    epochs = [(0, {"epoch": 0, "lr-AdamW": 1.0}), (11, {"epoch": 1, "lr-AdamW": 0.5})]
    assert rows(LearningRateMonitor(), Tuned(by_epoch)) == epochs
    # A step's row holds the rate that the step was made with, at the place of that step's metrics.
    steps = [(4 * n - 1, {"epoch": n // 3, "lr-AdamW": 0.5 ** (n - 1)}) for n in range(1, 6)]
    monitor = LearningRateMonitor()
    assert rows(monitor, Tuned(by_step)) == steps
    assert monitor.lrs == {"lr-AdamW": [1.0, 0.5, 0.25, 0.125, 0.0625]}
    assert rows(LearningRateMonitor("epoch"), Tuned(by_step)) == [
        (0, {"epoch": 0, "lr-AdamW": 1.0}),
        (11, {"epoch": 1, "lr-AdamW": 0.25}),
    ]
    assert [row[0] for row in rows(LearningRateMonitor("step"), Tuned(by_epoch))] == [3, 7, 11, 15, 19]
    assert rows(LearningRateMonitor("step"), Tuned(by_epoch), log_every_n_steps=0) == []
    # 6 windows of 2 batches an epoch, the last one shorter. Every step is logged once.
    module = Tuned(lambda parameters: SGD(parameters, lr=1.0))
    settings = {"accumulate_grad_batches": 2, "log_every_n_steps": 1}
    assert [row[0] for row in rows(LearningRateMonitor("step"), module, **settings)] == list(range(12))


def test_rows_are_named_by_optimizer_and_group() -> None:
    def groups(parameters: Any) -> Any:
        return SGD(
            [{"params": parameters[:1]}, {"params": parameters[1:], "name": "rest", "lr": 0.5}], lr=0.1, momentum=0.9
        )

    def named(parameters: Any) -> Any:
        optimizer = Adam(parameters, lr=0.1, weight_decay=0.01)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1), "name": "my_rate"}]

    def several(parameters: Any) -> Any:
        pair = [Adam(parameters, lr=0.1), Adam(parameters, lr=0.2), SGD(parameters, lr=0.3)]
        return pair, [StepLR(pair[1], 1)]

    [(_, values), *_] = rows(LearningRateMonitor("epoch", log_momentum=True), Tuned(groups))
    assert values == {
        "epoch": 0, "lr-SGD/pg1": 0.1, "lr-SGD/pg1-momentum": 0.9, "lr-SGD/rest": 0.5, "lr-SGD/rest-momentum": 0.9,
    }  # fmt: skip
    monitor = LearningRateMonitor("epoch", log_momentum=True, log_weight_decay=True)
    [(_, values), *_] = rows(monitor, Tuned(named))
    assert values == {"epoch": 0, "my_rate": 0.1, "my_rate-momentum": 0.9, "my_rate-weight_decay": 0.01}
    assert monitor.last_momentum_values == {"my_rate-momentum": 0.9}
    assert monitor.last_weight_decay_values == {"my_rate-weight_decay": 0.01}
    # Scheduled ones come first.
    [(_, values), *_] = rows(LearningRateMonitor("epoch"), TwoOptimizers(several))
    assert values == {"epoch": 0, "lr-Adam": 0.2, "lr-Adam-1": 0.1, "lr-SGD": 0.3}


def test_learning_rate_monitor_rejects_wrong_settings() -> None:
    with pytest.raises(ValueError, match="choose from step, epoch"):
        LearningRateMonitor("batch")
    with pytest.raises(ValueError, match="but logger=False"):
        tw.Trainer(callbacks=[LearningRateMonitor()], **QUIET).fit(Classifier(), make_loader())

    def twins(parameters: Any) -> Any:
        return SGD([{"params": [each], "name": "twin"} for each in parameters], lr=0.1)

    with pytest.raises(ValueError, match="have the same name"):
        rows(LearningRateMonitor(), Tuned(twins))


def test_the_rates_are_among_the_callback_metrics(tmp_path: Path) -> None:
    callbacks = [LearningRateMonitor(log_momentum=True), tw.ModelCheckpoint(str(tmp_path), "{lr-AdamW:.2f}")]
    trainer = fit(Classifier(), callbacks=callbacks, enable_checkpointing=True, logger=Rows())
    metrics = trainer.callback_metrics
    assert (metrics["lr-AdamW"].item(), metrics["lr-AdamW-momentum"].item()) == pytest.approx((0.05, 0.9))
    assert [path.name for path in tmp_path.iterdir()] == ["lr-AdamW=0.05.ckpt"]


def test_a_trial_run_needs_no_logger() -> None:
    trainer = tw.Trainer(callbacks=[LearningRateMonitor()], fast_dev_run=True, **{**QUIET, "logger": True})
    trainer.fit(Classifier(), make_loader())
    assert trainer.global_step == 1


def test_a_run_that_goes_on_within_an_epoch_writes_its_row_once(tmp_path: Path) -> None:
    def run(folder: Path, path: str | None = None, **limits: Any) -> str:
        callbacks = [LearningRateMonitor(), tw.ModelCheckpoint(folder / "checkpoints", every_n_train_steps=5)]
        settings = {**SAVING, "logger": tw.CSVLogger(folder, version=0), **limits}
        trainer = tw.Trainer(callbacks=callbacks, log_every_n_steps=3, **settings)
        trainer.fit(Classifier(), make_loader(), make_loader(4), ckpt_path=path)
        return Path(f"{trainer.log_dir}/metrics.csv").read_text()

    whole = run(tmp_path / "whole", max_epochs=3)
    # The columns, three epochs' beginnings, validations and ends, and two rows of every third step.
    assert len(whole.splitlines()) == 32
    run(tmp_path / "part", max_epochs=3, max_steps=15)
    assert run(tmp_path / "part", "last", max_epochs=3) == whole


def test_two_monitors_with_different_settings_work_in_one_run() -> None:
    callbacks = [LearningRateMonitor("step"), LearningRateMonitor("epoch", log_momentum=True)]
    trainer = fit(Classifier(), callbacks=callbacks, logger=Rows())
    assert {"lr-AdamW", "lr-AdamW-momentum"} <= trainer.callback_metrics.keys()


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_run_that_a_signal_ends_at_an_epochs_start_writes_its_row_once(tmp_path: Path, epoch: int) -> None:
    class Signals(tw.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == epoch and trainer.resume_source is None:
                os.kill(os.getpid(), signal.SIGTERM)

    def run(*callbacks: tw.Callback) -> str:
        settings = {**SAVING, "logger": tw.CSVLogger(tmp_path, version=0), "max_epochs": 2}
        saves = tw.ModelCheckpoint(tmp_path / "checkpoints")
        trainer = tw.Trainer(callbacks=[LearningRateMonitor(), saves, *callbacks], **settings)
        trainer.fit(Classifier(), make_loader(8), ckpt_path="auto")
        return Path(f"{trainer.log_dir}/metrics.csv").read_text()

    with pytest.raises(RunStopped):
        run(Signals())
    rows = [line.split(",") for line in run().splitlines()]
    column = rows[0].index("lr-AdamW")
    assert [row[column] for row in rows[1:] if row[column]] == ["0.05"] * 2
