"""A user's callback can use every hook that the built-in callbacks use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, assert_equal, fit, make_loader, weights

import trainwright as tw
from trainwright.callbacks.base import HOOKS
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.checkpoint.tensors import Piece


class Killed(Exception):
    pass


class Sums(tw.Callback):
    """Stores the sum of the weights after every step in pieces, beside the model."""

    priority = 5

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}

    def pieces(self, trainer: Any, module: Any) -> list[Piece]:
        return list(trainer.strategy.model_pieces(module))

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.sums = {piece.name: torch.zeros_like(piece.tensor) for piece in self.pieces(trainer, module)}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for piece in self.pieces(trainer, module):
            self.sums[piece.name] += piece.tensor.detach()

    def sharded_state_dict(self, trainer: Any, module: Any) -> dict[str, dict[str, torch.Tensor]]:
        return {"sums": self.sums}

    def load_sharded_state_dict(self, trainer: Any, module: Any, checkpoint: Any, edited: Any) -> None:
        pieces = self.pieces(trainer, module)
        targets = [Piece(piece.name, piece.shape, piece.start, self.sums[piece.name]) for piece in pieces]
        checkpoint.read_into("sums", targets)


class Saves(tw.Callback):
    """Decides in on_train_batch_end to save every third batch, saves at the save point, and makes up a save after a resume."""

    priority = -20

    def __init__(self, folder: Path, dies_at: int = -1) -> None:
        self.folder, self.dies_at, self.is_due, self.saved = folder, dies_at, False, list[int]()

    @property
    def state_key(self) -> str:
        return f"Saves({self.folder.name})"

    def state_dict(self) -> dict[str, Any]:
        return {"is_due": self.is_due, "saved": self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.is_due, self.saved = state["is_due"], list(state["saved"])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.is_due = trainer.global_step % 3 == 0

    def on_save_point(self, trainer: Any, module: Any) -> None:
        if self.is_due and trainer.global_step == self.dies_at:
            raise Killed
        if self.is_due:
            self.is_due = False
            self.saved.append(trainer.global_step)
            trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}.ckpt")

    def on_resume_end(self, trainer: Any, module: Any) -> None:
        self.on_save_point(trainer, module)


def test_callback_continues_tensors_and_saves_of_a_killed_run(tmp_path: Path) -> None:
    def run(folder: Path, dies_at: int = -1, ckpt_path: Any = None) -> tuple[Any, ...]:
        tw.seed_everything(3)
        sums, first, second = Sums(), Saves(folder / "first"), Saves(folder / "second", dies_at)
        module = Classifier(dropout=0.3)
        fit(module, ckpt_path=ckpt_path, max_epochs=2, callbacks=[first, second, sums])
        return weights(module), sums.sums, first.saved, second.saved

    whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "part", dies_at=6)
    resumed = run(tmp_path / "part", ckpt_path=tmp_path / "part/first/6.ckpt")
    assert_equal(resumed[0], whole[0])
    assert_equal(resumed[1], whole[1])
    assert resumed[2:] == whole[2:]


class Ends(tw.Callback):
    """Ends the run at a step, and again in a resumed run."""

    def __init__(self, at: int, calls: list[str]) -> None:
        self.at, self.calls, self.has_ended = at, calls, False

    def state_dict(self) -> dict[str, Any]:
        return {"has_ended": self.has_ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.has_ended = state["has_ended"]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.at:
            self.has_ended = trainer.should_stop = True

    def has_requested_stop(self, trainer: Any, module: Any) -> bool:
        return self.has_ended

    def on_resume_start(self, trainer: Any, module: Any) -> None:
        self.calls.append("resumed")
        trainer.should_stop = self.has_ended = self.has_ended and trainer.global_step >= self.at

    def on_train_epoch_stop(self, trainer: Any, module: Any) -> None:
        self.calls.append(f"stopped at {trainer.global_step}")
        trainer.save_checkpoint(f"{trainer.default_root_dir}/stopped.ckpt", overwrite=True)

    def on_run_end(self, trainer: Any, module: Any, result: str, error: BaseException | None) -> None:
        self.calls.append(f"{result} {error!r}")


@pytest.mark.parametrize("at", [3, 5])
def test_callback_stops_a_resumed_run_again_unless_its_settings_changed(tmp_path: Path, at: int) -> None:
    calls: list[str] = []
    settings = {"max_epochs": 1, "default_root_dir": tmp_path, **QUIET}
    tw.Trainer(callbacks=Ends(3, calls), **settings).fit(Classifier(), make_loader())
    assert calls == ["stopped at 3", "success None"]
    calls.clear()
    trainer = tw.Trainer(callbacks=Ends(at, calls), **settings)
    trainer.fit(Classifier(), make_loader(), ckpt_path=tmp_path / "stopped.ckpt")
    assert trainer.global_step == at
    assert calls[0] == "resumed"


@pytest.mark.parametrize("async_save", [False, True])
def test_callback_receives_the_path_of_every_complete_checkpoint(tmp_path: Path, async_save: bool) -> None:
    saved: list[tuple[str, str, int]] = []

    class Uploads(tw.Callback):
        def __init__(self, name: str, priority: int) -> None:
            self.name, self.priority = name, priority

        def on_checkpoint_saved(self, trainer: Any, module: Any, path: str) -> None:
            assert isinstance(module, Classifier)
            saved.append((self.name, Path(path).name, open_checkpoint(path).step))

    # The second save replaces the first, and the end of the fit saves once more.
    options = {"filename": "newest", "every_n_train_steps": 4, "save_last": True, "async_save": async_save}
    callbacks = [Uploads("late", -30), Uploads("early", 30), tw.ModelCheckpoint(tmp_path, **options)]
    settings = {**QUIET, "enable_checkpointing": True}
    tw.Trainer(max_epochs=1, callbacks=callbacks, **settings).fit(Classifier(), make_loader())
    paths = [("newest.ckpt", 4), ("newest.ckpt", 8), ("end-step=11.ckpt", 11)]
    assert saved == [(name, *path) for path in paths for name in ("early", "late")]


def test_callback_searches_a_setting_replaces_the_scheduler_and_passes_over_the_data() -> None:
    seen: list[Any] = []

    class Searched(Classifier):
        lr = 0.1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            seen.append(loss.requires_grad)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    class Everything(tw.Callback):
        scheduler: Any = None

        def on_tune(self, trainer: Any, module: Any, data: Any) -> None:
            trial = trainer.trial(max_steps=1)
            trial.fit(Searched(), data["train_dataloaders"])
            assert (trial.global_step, seen) == (1, [True])
            module.lr = 0.5

        def configure_lr_scheduler(self, trainer: Any, module: Any, optimizer: Any) -> Any:
            if trainer.current_epoch == 1:
                self.scheduler = self.scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
            return self.scheduler

        def on_before_train_end(self, trainer: Any, module: Any, run_epoch: Any) -> None:
            seen.clear()
            assert run_epoch()

    module = Searched()
    fit(module, max_epochs=3, limit_train_batches=2, callbacks=Everything())
    assert seen == [False, False]
    assert module.optimizers().param_groups[0]["lr"] == pytest.approx(0.005)  # type: ignore[union-attr]


def test_a_scheduler_hook_that_returns_a_number_is_rejected() -> None:
    class Number(tw.Callback):
        def configure_lr_scheduler(self, trainer: Any, module: Any, optimizer: Any) -> Any:
            return 0.1

    with pytest.raises(TypeError, match="a scheduler was expected, got a float"):
        tw.Trainer(max_epochs=1, callbacks=Number(), **QUIET).fit(Classifier(), make_loader())


def test_every_method_of_a_callback_is_a_hook_or_keeps_state() -> None:
    others = {"log", "log_dict", "state_dict", "load_state_dict", "state_key"}
    public = {name for name in vars(tw.Callback) if name[0] != "_"}
    assert public - set(HOOKS) == {*others, "priority", "reads_outputs"}


def test_a_wrong_priority_of_a_callback_is_rejected() -> None:
    callback = type("Mine", (tw.Callback,), {"__module__": "mine", "priority": "high"})()
    with pytest.raises(TypeError, match=r"Mine.*priority.* Set an int"):
        tw.Trainer(max_steps=1, callbacks=[callback], **QUIET)
