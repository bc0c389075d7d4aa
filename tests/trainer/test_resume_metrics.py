"""A run that resumes within an epoch logs the same values at its end as an uninterrupted run, bit for bit."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import SAVING, Classifier, assert_equal, make_loader, weights
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall

import trainwright as tw
from trainwright.checkpoint.codec import decode, encode
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.trainer.metrics import MetricCollector

BATCHES = 12  # of 45 samples


class Measured(Classifier):
    """Logs in every way that an epoch can be logged in."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.norms = MeanMetric()  # never logged itself
        self.both = MetricCollection([MulticlassPrecision(3, average="macro"), MulticlassRecall(3, average="macro")])
        self.val_accuracy = MulticlassAccuracy(3, average="macro")

    def on_train_start(self) -> None:
        self.log("begun", 1.0, reduce_fx="sum")

    def on_train_epoch_start(self) -> None:
        self.norms.reset()
        self.log("starts", 1.0, reduce_fx="sum")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        loss = torch.nn.functional.cross_entropy(outputs, batch[1])
        self.accuracy(outputs, batch[1])
        self.norms.update(outputs.norm())
        self.both.update(outputs, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("graph", loss, on_step=False, on_epoch=True, enable_graph=True, batch_size=3)
        self.log("least", loss, on_step=False, on_epoch=True, reduce_fx=min)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx=torch.max)
        self.log("seen", len(batch[0]), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict(self.both, on_step=False, on_epoch=True)
        if batch_idx == 0:
            self.log("first", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("norm", self.norms.compute())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self.net(batch[0])
        self.val_accuracy.update(outputs, batch[1])
        self.log("val_loss", torch.nn.functional.cross_entropy(outputs, batch[1]), on_step=True, on_epoch=True)
        self.log("val_accuracy", self.val_accuracy)


class Watch(tw.Callback):
    """Records the metrics of the epochs, of the start, and before the end of a batch."""

    priority = -10

    def __init__(self) -> None:
        self.epochs: dict[int, dict[str, float]] = {}
        self.batches: dict[int, dict[str, float]] = {}
        self.at_start: dict[str, float] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.at_start = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "begun"}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches[trainer.global_step] = {name: float(value) for name, value in trainer.callback_metrics.items()}

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs[trainer.current_epoch] = {name: float(value) for name, value in trainer.callback_metrics.items()}


def train(
    ckpt_path: Any = None, callbacks: Any = (), module: tw.Module | None = None, loader: Any = None, **settings: Any
) -> tuple[Watch, tw.Trainer]:
    tw.seed_everything(3)
    watch = Watch()
    trainer = tw.Trainer(
        callbacks=[watch, *callbacks], **{"max_epochs": 3, "num_sanity_val_steps": 0, **SAVING, **settings}
    )
    trainer.fit(
        module if module is not None else Measured(),
        loader or make_loader(45, 4, shuffle=True),
        make_loader(10, 4),
        ckpt_path=ckpt_path,
    )
    return watch, trainer


def keep_all(folder: Path, **settings: Any) -> tw.ModelCheckpoint:
    return tw.ModelCheckpoint(str(folder), save_top_k=-1, filename="{step}", auto_insert_metric_name=False, **settings)


def rows(trainer: tw.Trainer) -> list[dict[str, str]]:
    with (Path(str(trainer.log_dir)) / "metrics.csv").open() as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def test_a_run_taken_up_within_an_epoch_logs_the_whole_epoch(tmp_path: Path) -> None:
    plain, _ = train(enable_checkpointing=False)
    logging: dict[str, Any] = {"log_every_n_steps": 1, "val_check_interval": 4}
    saving = keep_all(tmp_path, every_n_train_steps=5)
    whole, trainer = train(callbacks=[saving], logger=tw.CSVLogger(str(tmp_path), name="whole"), **logging)
    unsaved, _ = train(enable_checkpointing=False, **logging)
    assert whole.epochs == unsaved.epochs  # a save changes no sum
    assert whole.epochs[1]["seen"] == 45
    assert "begun" in plain.epochs[0]
    for step in (5, 15, 20, 35):
        module = Measured()
        resumed, again = train(
            tmp_path / f"{step}.ckpt", module=module, logger=tw.CSVLogger(str(tmp_path), name=f"from {step}"), **logging
        )
        epoch = step // BATCHES
        assert resumed.epochs == {number: whole.epochs[number] for number in range(epoch, 3)}, step
        assert resumed.batches == {number: whole.batches[number] for number in range(step + 1, 37)}, step
        if epoch:
            assert resumed.at_start == {name: value for name, value in whole.batches[step].items() if name != "begun"}
        later = [row for row in rows(trainer) if is_later(row, step)]
        assert [row for row in rows(again) if is_later(row, step)] == later
        assert len(later) > 36 - step


def is_later(row: dict[str, str], step: int) -> bool:
    """Whether a run from this step on writes this row. The x value of an evaluation step counts evaluation batches."""
    if "val_loss_step" in row:
        return int(row["step"]) >= 3 * (step // 4)
    return int(row["step"]) > step


def test_a_run_that_stopped_within_an_epoch_goes_on_with_its_metrics(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"val_check_interval": 4}
    whole, _ = train(enable_checkpointing=False, **settings)
    stopped, trainer = train(callbacks=[keep_all(tmp_path)], max_steps=17, **settings)
    assert stopped.epochs[1]["seen"] < 45
    assert trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert float(trainer.callback_metrics["seen"]) == stopped.epochs[1]["seen"]
    for name in ("17.ckpt", "after.ckpt"):
        resumed, _ = train(tmp_path / name, enable_checkpointing=False, **settings)
        assert resumed.epochs == {epoch: whole.epochs[epoch] for epoch in (1, 2)}
        assert resumed.batches == {step: whole.batches[step] for step in range(18, 37)}
    # Taken up and stopped again before a single batch: nothing is lost by it.
    _, trainer = train(tmp_path / "17.ckpt", max_steps=17, enable_checkpointing=False, **settings)
    assert trainer.save_checkpoint(tmp_path / "twice.ckpt")
    resumed, _ = train(tmp_path / "twice.ckpt", enable_checkpointing=False, **settings)
    assert resumed.epochs[1] == whole.epochs[1]


class Plateau(Measured):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss_epoch"}}


def test_a_plateau_scheduler_goes_on_from_a_save_after_the_last_batch(tmp_path: Path) -> None:
    saving = keep_all(tmp_path, every_n_train_steps=BATCHES)
    modules = [Plateau(), Plateau()]
    whole, trainer = train(callbacks=[saving], module=modules[0])
    position = json.loads((tmp_path / "12.ckpt" / "state.json").read_text())["position"]
    assert (position["batch"], position["epoch_ended"]) == (BATCHES, False)
    resumed, again = train(tmp_path / "12.ckpt", module=modules[1], enable_checkpointing=False)
    assert resumed.epochs == whole.epochs
    states = [each.lr_scheduler_configs[0].scheduler.state_dict() for each in (trainer, again)]
    assert states[0] == states[1]
    assert states[0]["_last_lr"] != [0.5]
    assert_equal(weights(modules[1]), weights(modules[0]))


def job(folder: Path) -> Any:
    loader = make_loader(45, 4, shuffle=True)  # 6 batches a rank, the last one re-split
    whole, trainer = train(callbacks=[keep_all(folder, every_n_train_steps=4)], loader=loader)
    resumed, _ = train(folder / "8.ckpt", loader=loader, enable_checkpointing=False)
    _, trainer = train(callbacks=[keep_all(folder / "stopped")], loader=loader, max_steps=9)
    after, _ = train(folder / "stopped" / "9.ckpt", loader=loader, enable_checkpointing=False)
    return {
        "whole": whole.epochs,
        "resumed": resumed.epochs,
        "after": after.epochs,
        "steps": (whole.batches[9]["loss_step"], resumed.batches[9]["loss_step"]),
        "rank": trainer.global_rank,
    }


def test_two_ranks_restore_the_metrics_of_an_epoch(tmp_path: Path) -> None:
    results = run_job(job, 2, tmp_path)
    for result in results:
        assert result["whole"][1]["seen"] == 45
        assert result["resumed"] == {epoch: result["whole"][epoch] for epoch in (1, 2)}
        assert {**result["after"], 0: result["whole"][0]} == result["whole"]
        assert result["steps"][0] == result["steps"][1]
    assert results[0]["steps"] != results[1]["steps"]
    with pytest.warns(UserWarning, match="for this epoch the metric objects accuracy, .* cover only the batches after"):
        alone, _ = train(tmp_path / "8.ckpt", enable_checkpointing=False)
    assert alone.epochs[1]["seen"] == 45, "what both ranks had logged, and the rest of the epoch"
    assert alone.epochs[1]["least"] <= min(result["steps"][0] for result in results)


def test_a_save_within_a_validation_keeps_the_metrics_of_the_epoch(tmp_path: Path) -> None:
    """The training epoch's values are found while the validation has a collector, and its metrics do not mix."""

    class Save(tw.Callback):
        def save(self, trainer: Any, name: str) -> None:
            if trainer.current_epoch == 1 and trainer.state.progress.is_mid_epoch_validation:
                trainer.save_checkpoint(tmp_path / f"{name}-{trainer.global_step}.ckpt")

        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            if not (tmp_path / f"within-{trainer.global_step}.ckpt").exists():
                self.save(trainer, "within")

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            self.save(trainer, "epoch end")

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.save(trainer, "end")

    settings: dict[str, Any] = {"val_check_interval": 4, "enable_checkpointing": False}
    whole, _ = train(callbacks=[Save()], **settings)
    for name in ("within-16", "epoch end-16", "end-20"):
        resumed, _ = train(tmp_path / f"{name}.ckpt", **settings)
        assert resumed.epochs[2] == whole.epochs[2]
        assert resumed.epochs[1] == whole.epochs[1]
        state = open_checkpoint(str(tmp_path / f"{name}.ckpt")).rank_state(0)
        assert "accuracy" in state["metrics"]["metrics"]
        assert "val_accuracy" not in state["metrics"]["metrics"]
    resumed, _ = train(tmp_path / "end-20.ckpt", **settings)
    assert resumed.at_start["val_loss"] == whole.batches[21]["val_loss"]


def test_a_checkpoint_of_an_epochs_end_has_its_latest_values_only(tmp_path: Path) -> None:
    """Whoever follows a metric finds it before it is logged anew."""
    whole, _ = train(callbacks=[keep_all(tmp_path)])
    path = tmp_path / "24.ckpt"
    state = open_checkpoint(str(path)).rank_state(0)
    assert state["metrics"] is None
    best = tw.ModelCheckpoint(str(tmp_path / "best"), monitor="val_loss", every_n_train_steps=2)
    resumed, trainer = train(path, callbacks=[best], logger=False)
    assert resumed.at_start == {name: value for name, value in whole.epochs[1].items() if name != "begun"}
    assert float(best.best_model_score) == pytest.approx(float(resumed.epochs[2]["val_loss"]), rel=1e-6)
    assert resumed.epochs[2] == whole.epochs[2]
    assert trainer.progress_bar_metrics["loss_epoch"] == pytest.approx(float(whole.epochs[2]["loss_epoch"]), rel=1e-6)
    assert trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "metrics" not in json.loads((tmp_path / "weights.ckpt" / "state.json").read_text())


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("even", [True, False])
def test_pending_values_are_restored(reduce_fx: str, even: bool) -> None:
    """So the sums are made of the same groups, and are the same numbers, with a save or without."""
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(150, generator=generator).unbind()

    def log(collector: MetricCollector, value: Tensor, size: int) -> None:
        collector.hook = "training_step"
        collector.log("x", value, (False, True, False, True, reduce_fx, True, False, None, True, None, False), size)

    whole, part = (MetricCollector(torch.nn.Module()) for _ in range(2))
    for number, value in enumerate(values):
        size = 4 if even else 1 + number % 3
        log(whole, value, size)
        log(part, value, size)
        if number in (3, 63, 100, 140):
            before = part.state_dict()
            assert len(before["values"][0]["pending"]) == (number + 1) % 64
            assert part.state_dict() == before
            part = MetricCollector(torch.nn.Module())
            part.load_state_dict(decode(*encode(before)), torch.device("cpu"))
            assert part.state_dict() == before
    results = [next(iter(each.values.values())).total() for each in (whole, part)]
    assert float(results[0][0]) == float(results[1][0])
    assert results[0][1] == results[1][1]
