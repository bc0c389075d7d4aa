"""The same command, with ckpt_path="auto", after a run that has come to its end: nothing is left to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET, SAVING, Classifier, assert_equal, fit, make_loader, weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trainwright as tw
from trainwright.checkpoint.discovery import find_checkpoints


class Scored(Classifier):
    """Logs a score that gets worse every epoch, and counts its batches."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", float(self.current_epoch))


def run(saving: tw.ModelCheckpoint, *callbacks: tw.Callback, **settings: Any) -> Scored:
    torch.manual_seed(5)
    settings = {**SAVING, "max_epochs": 3, **settings}
    module = Scored()
    tw.Trainer(callbacks=[*callbacks, saving], **settings).fit(
        module, make_loader(shuffle=True), make_loader(4), ckpt_path="auto"
    )
    return module


@pytest.mark.parametrize("kwargs", [
    {},
    {"every_n_train_steps": 1000},
    {"every_n_train_steps": 7, "async_save": True},
    {"every_n_epochs": 2},
    {"monitor": "score"},
    {"save_weights_only": True},
    {"train_time_interval": "01:00:00:00"},
])  # fmt: skip
def test_a_finished_run_has_its_end_saved(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    first = run(tw.ModelCheckpoint(tmp_path, **kwargs))
    assert first.batches == 33
    names = {each.path for each in find_checkpoints(str(tmp_path))}
    for _ in range(2):
        again = run(tw.ModelCheckpoint(tmp_path, **kwargs))
        assert again.batches == 0
        assert_equal(weights(again), weights(first))
        assert {each.path for each in find_checkpoints(str(tmp_path))} == names
    longer = run(tw.ModelCheckpoint(tmp_path, **kwargs), max_epochs=4)
    assert longer.batches == 11


@pytest.mark.parametrize(("settings", "more"), [
    ({"patience": 1}, {"patience": 3}),
    ({"divergence_threshold": 0.5}, {"divergence_threshold": 9.0}),
    ({"stopping_threshold": -0.5, "mode": "max"}, {"mode": "max"}),
])  # fmt: skip
def test_a_run_that_was_ended_early_stays_ended(tmp_path: Path, settings: Any, more: Any, capsys: Any) -> None:
    def of(options: dict[str, Any]) -> Scored:
        return run(tw.ModelCheckpoint(tmp_path), tw.EarlyStopping("score", **options), max_epochs=9)

    first = of(settings)
    assert 0 < first.batches < 99
    capsys.readouterr()
    assert of(settings).batches == 0
    assert "; stopping." in capsys.readouterr().err
    assert of(more).batches > 0


def test_without_auto_no_end_is_saved(tmp_path: Path) -> None:
    saving = tw.ModelCheckpoint(tmp_path, every_n_train_steps=1000)
    fit(Scored(), callbacks=[saving], enable_checkpointing=True)
    assert find_checkpoints(str(tmp_path)) == []


def test_a_run_prints_which_checkpoint_it_resumes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights_only = tw.ModelCheckpoint(tmp_path, save_weights_only=True)
    fit(Scored(), callbacks=[weights_only], enable_checkpointing=True)
    run(tw.ModelCheckpoint(tmp_path, filename="{epoch}"), max_epochs=1)
    assert "that a fit can resume from; starting from scratch" in capsys.readouterr().out
    run(tw.ModelCheckpoint(tmp_path, filename="{epoch}"))
    assert f"resuming from {tmp_path}/epoch=0.ckpt: epoch 1, batch 0, step 11" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["max_steps", "early stopping"])
def test_a_finished_run_keeps_its_rows(tmp_path: Path, kind: str) -> None:
    """A run that ended within an epoch keeps its values and its rows when it starts again."""

    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("mean", loss.detach(), on_step=False, on_epoch=True)
            return loss

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_score", float(len(batch[1])))

    def once(**more: Any) -> tuple[tw.Trainer, str]:
        torch.manual_seed(5)
        limits: dict[str, Any] = {"max_steps": 15} if kind == "max_steps" else {"max_epochs": 5}
        stopping = [tw.EarlyStopping("val_loss", patience=2, min_delta=10.0)] if kind == "early stopping" else []
        trainer = tw.Trainer(
            default_root_dir=tmp_path,
            logger=[tw.CSVLogger(tmp_path), tw.TensorBoardLogger(tmp_path)],
            log_every_n_steps=1,
            callbacks=[*stopping, tw.ModelCheckpoint(every_n_train_steps=5)],
            val_check_interval=5,
            **{key: value for key, value in QUIET.items() if key not in ("logger", "enable_checkpointing")},
            **{**limits, **more},
        )
        trainer.fit(Logs(), make_loader(shuffle=True), make_loader(4), ckpt_path="auto")
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        trainer.test(dataloaders=make_loader(4), verbose=False)
        rows = (tmp_path / "trainwright_logs/version_0/metrics.csv").read_text()
        events = EventAccumulator(trainer.log_dir, size_guidance={"scalars": 0})
        events.Reload()
        scalars = {
            tag: sorted((each.step, each.value) for each in events.Scalars(tag))
            for tag in sorted(events.Tags()["scalars"])
        }
        return trainer, repr([trainer.global_step, values, rows, scalars])

    trainer, first = once()
    assert "'mean': " in first
    count = len(find_checkpoints(str(trainer.checkpoint_callback.dirpath)))
    for _ in range(2):
        trainer, again = once()
        assert again == first
        assert len(find_checkpoints(str(trainer.checkpoint_callback.dirpath))) == count


class Halving(Scored):
    """Halves its learning rate and its weights, and counts, at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ends", torch.zeros(()))

    def on_train_epoch_end(self) -> None:
        assert isinstance(self.ends, torch.Tensor)
        self.ends += 1
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] /= 2
        with torch.no_grad():
            for weight in self.parameters():
                weight /= 2


@pytest.mark.parametrize("options", [{}, {"save_last": True}, {"async_save": True}, {"monitor": "train_score"}])
def test_hooks_of_an_epochs_end_run_once_however_often_the_command_runs(tmp_path: Path, options: Any) -> None:
    class Logged(Halving):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train_score", float(batch_idx))
            return super().training_step(batch, batch_idx)

    def ended(folder: Path, steps: int) -> Any:
        torch.manual_seed(5)
        module, saving = Logged(), tw.ModelCheckpoint(folder, **options)
        trainer = tw.Trainer(callbacks=[saving], **{**SAVING, "max_steps": steps})
        trainer.fit(module, make_loader(shuffle=True), ckpt_path="auto")
        return {**weights(module), "lr": torch.tensor(trainer.optimizers[0].param_groups[0]["lr"])}

    whole = ended(tmp_path / "whole", 30)
    stopped = [ended(tmp_path / "cut", 15) for _ in range(3)]  # in the second epoch of eleven batches
    assert_equal(stopped[1], stopped[0])
    assert_equal(stopped[2], stopped[0])
    assert_equal(ended(tmp_path / "cut", 30), whole)
