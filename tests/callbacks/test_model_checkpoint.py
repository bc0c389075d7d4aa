"""ModelCheckpoint: the kept checkpoints and their names, and files that it never deletes."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small
import torch
from jobs import run_job
from small import QUIET, SAVING, Classifier, assert_equal, loss_of, make_loader, weights
from torch import Tensor
from torch.utils.data import default_collate

import trainwright as tw
from trainwright.checkpoint.discovery import find_checkpoints

Scored = partial(small.Scored, name="val/score")


def run(folder: Path, scores: list[float], ckpt_path: str | None = None, **kwargs: Any) -> tw.ModelCheckpoint:
    callback = tw.ModelCheckpoint(str(folder), **{"monitor": "val/score", **kwargs})
    trainer = tw.Trainer(max_epochs=len(scores), callbacks=[callback], **SAVING)
    trainer.fit(Scored(scores), make_loader(), make_loader(4), ckpt_path=ckpt_path)
    return callback


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.is_symlink())


@pytest.mark.parametrize(("kwargs", "kept", "best"), [
    ({"save_top_k": 1}, [2], 2),
    ({"save_top_k": 2}, [2, 3], 2),
    ({"save_top_k": 2, "mode": "max"}, [1, 4], 1),
    ({"save_top_k": -1}, [0, 1, 2, 3, 4], 2),
    ({"save_top_k": 1, "save_last": True}, [2, 4], 2),
    ({"save_top_k": 0, "save_last": True}, [4], None),
    ({"save_top_k": 1, "monitor": None}, [4], 4),
    ({"save_top_k": 0}, [], None),
    ({"save_top_k": -1, "every_n_epochs": 2}, [1, 3], 3),
])  # fmt: skip
def test_model_checkpoint_keeps_the_best(tmp_path: Path, kwargs: Any, kept: list[int], best: int | None) -> None:
    callback = run(tmp_path / "kept", [3.0, 5.0, 1.0, 2.0, 4.0], **kwargs)
    expected = [f"epoch={epoch}-step={11 * (epoch + 1)}.ckpt" for epoch in kept]
    assert (names(tmp_path / "kept") if kept else []) == expected
    assert Path(callback.best_model_path).name == ("" if best is None else f"epoch={best}-step={11 * (best + 1)}.ckpt")
    if kept:
        assert callback.last_model_path or best is not None


def test_a_score_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    callback = run(tmp_path, [2.0, float("nan"), float("-inf"), float("nan")], save_last=True)
    assert names(tmp_path) == ["epoch=0-step=11.ckpt", "epoch=3-step=44.ckpt"]
    assert callback.best_model_score == 2.0


def test_a_training_metric_scores_the_epoch_that_logs_it(tmp_path: Path) -> None:
    """It is logged every second epoch. The epochs between do not use its value, also in a resumed run."""

    class Sometimes(Classifier):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch % 2 == 0:
                self.log("score", [3.0, 2.0, 1.0][self.current_epoch // 2])

    for epochs in (4, 6):
        callback = tw.ModelCheckpoint(tmp_path, "{epoch}", monitor="score", mode="min", save_top_k=3, save_last=True)
        trainer = tw.Trainer(max_epochs=epochs, callbacks=[callback], **SAVING)
        trainer.fit(Sometimes(), make_loader(), ckpt_path="auto")
    kept = {Path(path).name: float(score) for path, score in callback.best_k_models.items()}
    assert kept == {"epoch=0.ckpt": 3.0, "epoch=2.ckpt": 2.0, "epoch=4.ckpt": 1.0}
    assert Path(callback.last_model_path).name == "epoch=5-step=66.ckpt"


def test_a_resumed_run_keeps_judging_where_it_was(tmp_path: Path) -> None:
    run(tmp_path, [1.0, 2.0], save_top_k=2)
    callback = run(tmp_path, [1.0, 2.0, 3.0, 0.5], ckpt_path="last", save_top_k=2)
    kept = {Path(path).name: score for path, score in callback.best_k_models.items()}
    assert kept == {"epoch=0-step=11.ckpt": 1.0, "epoch=3-step=44.ckpt": 0.5}
    # The checkpoint that the run was resumed from is left, though it is no longer among the best.
    assert set(names(tmp_path)) == {*kept, "epoch=1-step=22.ckpt"}


@pytest.mark.parametrize("move", [shutil.copytree, shutil.move])
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_moved_folder_keeps_what_it_kept(tmp_path: Path, move: Any, weights_only: bool) -> None:
    """The best checkpoints and scores equal those in one folder. The best of the first folder stays there."""

    def fit(folder: Path, scores: list[float], **kwargs: Any) -> dict[str, float]:
        best = tw.ModelCheckpoint(folder, "best-{epoch}", "val/score", save_top_k=2, save_weights_only=weights_only)
        callbacks = [best, tw.ModelCheckpoint(folder)]
        trainer = tw.Trainer(max_epochs=len(scores), callbacks=callbacks, **SAVING)
        trainer.fit(Scored(scores), make_loader(), make_loader(4), **kwargs)
        assert all(Path(path).parent == folder for path in [*best.best_k_models, best.best_model_path])
        return {Path(path).name: float(score) for path, score in best.best_k_models.items()}

    fit(tmp_path / "first", [1.0, 3.0])
    move(tmp_path / "first", tmp_path / "second")
    assert fit(tmp_path / "second", [1.0, 3.0, 2.0], ckpt_path="auto") == {
        "best-epoch=0.ckpt": 1.0,
        "best-epoch=2.ckpt": 2.0,
    }
    assert "best-epoch=1.ckpt" not in names(tmp_path / "second")  # no longer among the best
    assert (tmp_path / "first" / "best-epoch=1.ckpt").exists() == (move is shutil.copytree)


def test_a_moved_checkpoint_does_not_adopt_another_runs(tmp_path: Path) -> None:
    """In the new folder another run has saved a checkpoint of the same name at the same step."""
    ours = run(tmp_path / "ours", [1.0, 2.0], save_top_k=2)
    theirs = run(tmp_path / "theirs", [5.0]).best_model_path
    assert Path(theirs).name in names(tmp_path / "ours")
    source = shutil.copytree(ours.last_model_path, tmp_path / "theirs" / Path(ours.last_model_path).name)
    callback = run(tmp_path / "theirs", [1.0, 2.0, 0.5], ckpt_path=str(source))
    assert Path(theirs).exists()
    assert theirs not in callback.best_k_models


def test_taken_names_get_versions(tmp_path: Path) -> None:
    kwargs = {"filename": "{epoch}-{val/score:.2f}", "save_top_k": -1}
    run(tmp_path, [0.5], **kwargs)
    run(tmp_path, [0.5], **kwargs)
    run(tmp_path, [0.5], **{**kwargs, "auto_insert_metric_name": False})
    assert names(tmp_path) == ["0-0.50.ckpt", "epoch=0-val_score=0.50-v1.ckpt", "epoch=0-val_score=0.50.ckpt"]
    with pytest.raises(ValueError, match="asks for 'accuracy', which was not logged; there are epoch, loss"):
        run(tmp_path, [0.5], filename="{accuracy}")


def test_a_step_value_can_be_followed(tmp_path: Path) -> None:
    class Stepwise(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("now", loss)
            return loss

    callback = tw.ModelCheckpoint(str(tmp_path), monitor="now")
    trainer = small.fit(Stepwise(), callbacks=[callback], enable_checkpointing=True)
    assert callback.best_model_score == trainer.callback_metrics["now"].item()


def test_each_fit_keeps_its_own(tmp_path: Path) -> None:
    """The second module is worse, but it was trained last. The files of the first stay."""
    callback = tw.ModelCheckpoint(str(tmp_path), monitor="val/score", save_last=True)
    trainer = tw.Trainer(max_epochs=1, callbacks=[callback], **SAVING)
    trainer.fit(Scored([1.0]), make_loader(), make_loader(4))
    second = Scored([2.0])
    second.lr = 0.5
    trainer.fit(second, make_loader(), make_loader(4))
    assert callback.best_model_path == callback.last_model_path == f"{tmp_path}/epoch=0-step=11-v1.ckpt"
    assert callback.best_model_score == 2.0
    assert names(tmp_path) == ["epoch=0-step=11-v1.ckpt", "epoch=0-step=11.ckpt"]
    trained = weights(second)
    trainer.validate(second, make_loader(4), ckpt_path="best", verbose=False)
    assert_equal(weights(second), trained)
    # A resumed fit keeps its source. A fit that is rejected before it begins changes nothing.
    with pytest.warns(UserWarning, match="lr of group 0 of optimizer 0 is 0.5 there and 0.05 here"):
        trainer.fit(Scored([1.0]), make_loader(), make_loader(4), ckpt_path="last")
    assert callback.best_model_score == 2.0
    with pytest.raises(tw.CheckpointError):
        trainer.fit(Scored([1.0]), make_loader(), make_loader(4), ckpt_path=str(tmp_path / "none"))
    assert callback.best_model_score == 2.0


def test_a_failed_save_is_told_and_the_kept_ones_stay(tmp_path: Path) -> None:
    """The disk is full for the second save: the callback goes on knowing the first."""
    callback = tw.ModelCheckpoint(str(tmp_path / "kept"), save_top_k=-1, save_last=True)

    class Full(tw.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.engine.save = self.fail

        def fail(self, *args: Any, **kwargs: Any) -> None:
            raise tw.CheckpointError("no space left")

    trainer = tw.Trainer(max_epochs=3, callbacks=[callback, Full()], **SAVING)
    with pytest.raises(tw.CheckpointError, match="no space left"):
        trainer.fit(Scored([1.0]), make_loader(), make_loader(4))
    assert names(tmp_path / "kept") == ["epoch=0-step=11.ckpt"]
    assert Path(callback.last_model_path).name == Path(callback.best_model_path).name == "epoch=0-step=11.ckpt"


@pytest.mark.parametrize(("kwargs", "match"), [
    ({"mode": "least"}, "choose from min, max"),
    ({"save_top_k": -2}, "or -1 for all"),
    ({"save_top_k": 3}, "needs a metric that decides"),
    ({"every_n_epochs": -1}, "pass an integer"),
    ({"every_n_epochs": 2, "every_n_train_steps": 3}, "exclude each other"),
    ({"every_n_epochs": 2, "train_time_interval": "00:00:10:00"}, "exclude each other"),
    ({"train_time_interval": "10 minutes"}, "train_time_interval='10 minutes'"),
    ({"save_last": "copy"}, "choose from True, False, None, 'link'"),
    ({"filename": "{epoch"}, "a brace without its pair"),
])  # fmt: skip
def test_model_checkpoint_rejects_wrong_settings(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        tw.ModelCheckpoint(**kwargs)


@pytest.mark.parametrize("changes", [{"filename": "{step}"}, {"save_top_k": 3}, {"every_n_epochs": 2}])
def test_a_resume_with_other_settings_remembers_the_best(changes: dict[str, Any], tmp_path: Path) -> None:
    first = run(tmp_path, [1.0, 2.0], save_last=True)
    resumed = run(tmp_path, [1.0, 2.0, 4.0, 3.0], ckpt_path=first.last_model_path, save_last=True, **changes)
    assert (resumed.best_model_path, resumed.best_model_score) == (first.best_model_path, 1.0)
    assert Path(first.best_model_path).exists()


def test_a_resume_in_another_folder_remembers_the_best(tmp_path: Path) -> None:
    first = run(tmp_path / "a", [1.0, 2.0], save_last=True)
    resumed = run(tmp_path / "b", [1.0, 2.0, 3.0], ckpt_path=first.last_model_path, save_last=True)
    assert resumed.best_model_path == first.best_model_path
    run(tmp_path / "b", [1.0, 2.0, 3.0, 0.5], ckpt_path=resumed.last_model_path, save_last=True)
    assert Path(first.best_model_path).exists(), "the run in b replaces no file of a"


def test_a_resume_that_keeps_fewer_drops_the_worst(tmp_path: Path) -> None:
    first = run(tmp_path, [3.0, 1.0, 2.0], save_top_k=3)
    source = f"{tmp_path}/epoch=2-step=33.ckpt"
    resumed = run(tmp_path, [3.0, 1.0, 2.0, 1.5, 0.5], ckpt_path=source, save_top_k=1)
    assert [Path(path).name for path in resumed.best_k_models] == ["epoch=4-step=55.ckpt"]
    assert names(tmp_path) == ["epoch=2-step=33.ckpt", "epoch=4-step=55.ckpt"], first


def test_a_run_deletes_only_in_its_own_folder(tmp_path: Path) -> None:
    earlier = run(tmp_path / "a", [1.0, 2.0], save_top_k=2)
    run(tmp_path / "b", [1.0, 2.0, 0.5, 0.4], ckpt_path=earlier.last_model_path, save_top_k=1)
    assert names(tmp_path / "a") == ["epoch=0-step=11.ckpt", "epoch=1-step=22.ckpt"]
    assert names(tmp_path / "b") == ["epoch=3-step=44.ckpt"]


def train(callback: tw.ModelCheckpoint | None, *more: tw.Callback, **kwargs: Any) -> tw.Trainer:
    """Train a module with dropout on 11 shuffled batches an epoch."""
    tw.seed_everything(3)
    module, collate = kwargs.pop("module", Classifier), kwargs.pop("collate_fn", None)
    ckpt_path, has_validation = kwargs.pop("ckpt_path", None), kwargs.pop("has_validation", False)
    callbacks = [*more, *([callback] if callback is not None else [])]
    settings = {**QUIET, "enable_checkpointing": callback is not None, "max_epochs": 3, **kwargs}
    trainer = tw.Trainer(callbacks=callbacks, **settings)
    loaders = [make_loader(shuffle=True, collate_fn=collate), *([make_loader(8)] if has_validation else [])]
    trainer.fit(module(dropout=0.3), *loaders, ckpt_path=ckpt_path)
    return trainer


def end(trainer: tw.Trainer) -> dict[str, Tensor]:
    return weights(trainer.lightning_module)


def test_checkpoint_saves_every_n_train_steps(tmp_path: Path) -> None:
    """A run resumed from any of them equals the uninterrupted run."""
    callback = tw.ModelCheckpoint(str(tmp_path), save_top_k=-1, every_n_train_steps=5)
    whole = end(train(callback))
    steps = (5, 10, 15, 20, 25, 30)
    assert names(tmp_path) == sorted(f"epoch={(step - 1) // 11}-step={step}.ckpt" for step in steps)
    for path in list(callback.best_k_models)[1::2]:
        assert_equal(end(train(None, ckpt_path=path)), whole)


def test_checkpoint_counts_the_steps_of_windows(tmp_path: Path) -> None:
    """Windows of 4 batches: 3 steps an epoch, all saved once."""
    callback = tw.ModelCheckpoint(str(tmp_path), save_top_k=-1, every_n_train_steps=2)
    train(callback, accumulate_grad_batches=4)
    assert names(tmp_path) == [f"epoch={epoch}-step={step}.ckpt" for epoch, step in ((0, 2), (1, 4), (1, 6), (2, 8))]


def test_a_step_save_before_the_metric_is_there(tmp_path: Path) -> None:
    """Before the first validation there is no score, so the save waits for that validation."""
    callback = tw.ModelCheckpoint(str(tmp_path), monitor="val_loss", save_last=True, every_n_train_steps=8)
    with pytest.warns(UserWarning, match="monitors 'val_loss', which was not logged yet") as caught:
        train(callback, has_validation=True, max_epochs=1)
    assert len(caught) == 1
    assert names(tmp_path) == ["epoch=0-step=11.ckpt"]
    assert callback.best_model_path == callback.last_model_path == f"{tmp_path}/epoch=0-step=11.ckpt"
    train(callback, has_validation=True, max_epochs=2, ckpt_path="last")
    assert callback.last_model_path == f"{tmp_path}/epoch=1-step=22.ckpt"


def test_checkpoint_saves_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("trainwright.callbacks.model_checkpoint.time", clock)

    class Passes(tw.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            clock.now += 150.0

    callback = tw.ModelCheckpoint(str(tmp_path), save_top_k=-1, train_time_interval=timedelta(minutes=10))
    train(callback, Passes(), max_epochs=1)
    assert names(tmp_path) == ["epoch=0-step=4.ckpt", "epoch=0-step=8.ckpt"]


def test_checkpoint_saves_after_validations_within_an_epoch(tmp_path: Path) -> None:
    """Of 11 batches an epoch two validations, or three: the one at the epoch's end is saved with it."""
    ends = ((0, 11), (1, 22))
    within = ((0, 5), (0, 10), (1, 16), (1, 21))
    for folder, save_on_train_epoch_end, interval, steps in (
        ("auto", None, 0.5, within),
        ("within", False, 0.5, within),
        ("end", True, 0.5, ends),
        ("both", None, 1, tuple((step > 11, step) for step in range(1, 23))),
    ):
        callback = tw.ModelCheckpoint(
            str(tmp_path / folder),
            monitor=None if folder == "end" else "val_loss",
            save_top_k=-1,
            save_on_train_epoch_end=save_on_train_epoch_end,
        )
        settings = {"has_validation": True, "max_epochs": 2, "val_check_interval": interval}
        whole = train(callback, **settings)
        assert names(tmp_path / folder) == sorted(f"epoch={int(epoch)}-step={step}.ckpt" for epoch, step in steps)
        for path in list(callback.best_k_models)[-3:]:
            resumed = train(None, ckpt_path=path, **settings)
            assert_equal(end(resumed), end(whole))
            assert resumed.global_step == 22


def test_a_validation_that_is_due_within_a_window_waits(tmp_path: Path) -> None:
    """After 5 and 10 of 11 batches, in windows of 4: after 8 and 11."""
    callback = tw.ModelCheckpoint(str(tmp_path), monitor="val_loss", save_top_k=-1)
    settings = {"has_validation": True, "max_epochs": 1, "val_check_interval": 5, "accumulate_grad_batches": 4}
    whole = end(train(callback, **settings))
    assert names(tmp_path)[0] == "epoch=0-step=2.ckpt"
    assert_equal(end(train(None, ckpt_path=f"{tmp_path}/epoch=0-step=2.ckpt", **settings)), whole)


def test_epochs_without_validation_are_not_saved(tmp_path: Path) -> None:
    for folder, save_on_train_epoch_end, epochs in (("auto", None, [1, 3]), ("end", True, [0, 1, 2, 3])):
        callback = tw.ModelCheckpoint(
            str(tmp_path / folder), save_top_k=-1, save_on_train_epoch_end=save_on_train_epoch_end
        )
        train(callback, has_validation=True, max_epochs=4, check_val_every_n_epoch=2)
        assert names(tmp_path / folder) == [f"epoch={epoch}-step={11 * (epoch + 1)}.ckpt" for epoch in epochs]


def test_checkpoint_can_be_switched_off(tmp_path: Path) -> None:
    for kwargs in ({"every_n_epochs": 0}, {"every_n_train_steps": 0}):
        callback = tw.ModelCheckpoint(str(tmp_path / "none"), **kwargs)
        train(callback, max_epochs=1)
        assert not (tmp_path / "none").exists()


class Fails(tw.Callback):
    """Raises at a hook, at a given batch of the second epoch."""

    def __init__(self, hook: str, batch: int, error: BaseException) -> None:
        self.place, self.batch, self.error = hook, batch, error
        setattr(self, hook, self.fail)

    def fail(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.current_epoch == 1 and trainer.state.batch >= self.batch:
            raise self.error


def failing_collate(batch: int, error: BaseException) -> Any:
    """Return a collate function that fails at the given batch of the second epoch, as broken data do."""
    made: list[int] = []

    def collate(samples: Any) -> Any:
        made.append(len(samples))
        if len(made) == 11 + batch + 1:
            raise error
        return default_collate(samples)

    return collate


class DrawsInValidation(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(3)
        super().validation_step(batch, batch_idx)


BROKEN = "broken data"
FAILURES: dict[str, tuple[Fails | None, BaseException, dict[str, Any]]] = {
    "a batch cannot be loaded": (None, RuntimeError(BROKEN), {}),
    "Ctrl-C while a batch is loaded": (None, KeyboardInterrupt(BROKEN), {}),
    "a validation": (Fails("on_validation_batch_end", 4, KeyError(BROKEN)), KeyError(BROKEN),
        {"has_validation": True, "val_check_interval": 4}),
    "a validation's beginning": (Fails("on_validation_start", 4, RuntimeError(BROKEN)), RuntimeError(BROKEN),
        {"has_validation": True, "val_check_interval": 4}),
    "an epoch's start": (Fails("on_train_epoch_start", 0, RuntimeError(BROKEN)), RuntimeError(BROKEN), {}),
    "the end of a run that stops": (Fails("on_train_epoch_end", 4, RuntimeError(BROKEN)), RuntimeError(BROKEN),
        {"has_validation": True, "max_steps": 15}),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_a_failed_run_is_saved_where_it_can_be_resumed(tmp_path: Path, case: str, capsys: Any) -> None:
    fails, error, settings = FAILURES[case]
    resumed = {key: value for key, value in settings.items() if key != "max_steps"}
    whole = train(None, module=DrawsInValidation, **resumed)
    callback = tw.ModelCheckpoint(str(tmp_path), save_top_k=0, save_on_exception=True)
    if fails is None:
        settings = {"collate_fn": failing_collate(4, error)}
    with pytest.raises(type(error), match=BROKEN):
        train(callback, *([fails] if fails is not None else []), module=DrawsInValidation, **settings)
    path = f"{tmp_path}/exception-epoch=1-step={11 if 'start' in case else 15}.ckpt"
    assert f"the run was saved as {path}" in capsys.readouterr().err
    again = train(None, module=DrawsInValidation, ckpt_path=path, **resumed)
    assert_equal(end(again), end(whole))
    assert again.callback_metrics == whole.callback_metrics


def test_a_failed_run_is_not_saved_where_it_cannot(tmp_path: Path, capsys: Any) -> None:
    def fail(hook: str, batch: int, **settings: Any) -> str:
        callback = tw.ModelCheckpoint(str(tmp_path), save_top_k=0, save_on_exception=True)
        with pytest.raises(RuntimeError, match="this one is seen"):
            train(callback, Fails(hook, batch, RuntimeError("this one is seen")), **settings)
        return str(capsys.readouterr().err)

    within, at_end = {"has_validation": True, "val_check_interval": 4}, "at the end of an epoch"
    stepped = "in a batch, during or after its optimizer step; no earlier checkpoint exists"
    assert stepped in fail("on_before_optimizer_step", 2)
    assert stepped in fail("on_train_batch_end", 2)
    error = RuntimeError("this one is seen")
    windows = {"accumulate_grad_batches": 4, "collate_fn": failing_collate(2, error)}
    assert "an accumulation window" in fail("on_fit_end", 0, **windows)
    assert "at the end of a validation" in fail("on_validation_end", 4, **within)
    assert at_end in fail("on_validation_start", 0, has_validation=True)
    assert at_end in fail("on_train_epoch_end", 0)
    assert not list(tmp_path.iterdir())

    class FailsInSave(Classifier):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            raise OSError("no")

    assert "the save failed: OSError: no" in fail("on_train_epoch_start", 0, module=FailsInSave)
    (tmp_path / "exception-epoch=1-step=11.ckpt").write_text("in the way")
    assert "exception-epoch=1-step=11-v1.ckpt" in fail("on_train_epoch_start", 0)


def test_one_name_for_all_replaces_the_one_before(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"filename": "best", "enable_version_counter": False}
    callback = run(tmp_path, [3.0, 5.0, 1.0, 4.0], **kwargs)
    assert names(tmp_path) == ["best.ckpt"]
    assert callback.best_model_path == f"{tmp_path}/best.ckpt"
    trainer = tw.Trainer(max_epochs=4, **QUIET)
    trainer.fit(Scored([3.0, 5.0, 1.0, 4.0]), make_loader(), make_loader(4), ckpt_path=callback.best_model_path)
    assert trainer.global_step == 44
    # The best checkpoint and the resume source are not replaced.
    callback = run(tmp_path / "last", [3.0, 1.0, 4.0], save_last=True, **kwargs)
    assert names(tmp_path / "last") == ["best.ckpt", "epoch=2-step=33.ckpt"]
    assert callback.best_model_path == f"{tmp_path}/last/best.ckpt"
    source = callback.last_model_path
    run(tmp_path / "last", [3.0, 1.0, 4.0, 0.5, 0.4], save_last=True, ckpt_path=source, **kwargs)
    assert Path(source).name in names(tmp_path / "last")


def test_values_are_tensors_and_come_back(tmp_path: Path) -> None:
    callback = run(tmp_path, [3.0, 1.0, 2.0], save_top_k=2)
    assert isinstance(callback.best_model_score, Tensor)
    assert (callback.best_model_score.item(), callback.best_model_score.shape) == (1.0, torch.Size([]))
    assert isinstance(callback.kth_value, Tensor)
    assert (callback.kth_value.item(), Path(callback.kth_best_model_path).name) == (2.0, "epoch=2-step=33.ckpt")
    assert isinstance(callback.current_score, Tensor)
    assert callback.current_score.item() == 2.0
    again = tw.ModelCheckpoint(str(tmp_path), monitor="val/score", save_top_k=2)
    assert again.state_key == callback.state_key
    again.load_state_dict(callback.state_dict())
    assert again.state_dict() == callback.state_dict()
    assert again.best_model_path == callback.best_model_path
    assert again.kth_best_model_path == callback.kth_best_model_path


def test_format_checkpoint_name_fills_the_template() -> None:
    values = {"epoch": 2, "step": 7, "val/loss": torch.tensor(0.5)}
    callback = tw.ModelCheckpoint("runs/", "{epoch:02d}-{val/loss:.2f}")
    assert callback.format_checkpoint_name(values) == f"{Path.cwd()}/runs/epoch=02-val_loss=0.50.ckpt"
    assert callback.format_checkpoint_name(values, "{step}", ver=3) == f"{Path.cwd()}/runs/step=7-v3.ckpt"
    assert tw.ModelCheckpoint(filename="fixed").format_checkpoint_name(values) == "fixed.ckpt"


def test_arguments_have_lightnings_order(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    callback = tw.ModelCheckpoint(
        tmp_path, "{epoch}", "val/score", True, "link", 2, False, True, "max", False, 0, None, 1
    )
    assert callback.monitor == "val/score"
    trainer = tw.Trainer(max_epochs=1, callbacks=[callback], **SAVING)
    trainer.fit(Scored([0.5]), make_loader(), make_loader(4))
    assert names(tmp_path) == ["0.ckpt"]
    assert f"epoch 0, step 11: saved {tmp_path}/0.ckpt" in capsys.readouterr().out


class Blind(tw.ModelCheckpoint):
    """Rank 1 does not find the files of the run before."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state if os.environ["RANK"] == "0" else {**state, "best_k_models": {}})


def two_ranks(folder: Path) -> dict[str, Any]:
    """Rank 1's clock, its metrics and its files say something else than rank 0's."""

    class RankScored(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            # Rank 0's watch has to post the save by time before the run ends.
            time.sleep(0.5 if self.global_step >= 20 and not by_time.state_dict()["best_k_models"] else 0.02)
            loss = super().training_step(batch, batch_idx)
            self.log("own", float(self.global_step) * (1 if self.global_rank == 0 else -1))
            self.log("first" if self.global_rank == 0 else "second", float(self.global_step))
            return loss

    def trained(callbacks: list[tw.Callback], epochs: int, ckpt_path: str | None = None) -> None:
        trainer = tw.Trainer(max_epochs=epochs, devices=2, callbacks=callbacks, **SAVING)
        trainer.fit(RankScored(), make_loader(), ckpt_path=ckpt_path)

    def by_step(name: str, kind: type[tw.ModelCheckpoint] = tw.ModelCheckpoint, **kwargs: Any) -> tw.ModelCheckpoint:
        settings: dict[str, Any] = {"every_n_train_steps": 2, "filename": "{step}", **kwargs}
        return kind(str(folder / name), **settings)

    by_time = tw.ModelCheckpoint(
        str(folder / "time"), save_top_k=-1, train_time_interval=timedelta(seconds=0.2), filename="{step}"
    )
    by_metric = by_step("metric", Blind, monitor="own")
    by_first = by_step("first", monitor="first", mode="max")
    exceptional = tw.ModelCheckpoint(str(folder / "exception"), save_on_exception=True, every_n_epochs=0)
    trained([by_time, by_metric, by_first, exceptional], 6)
    resumed = by_step("metric", Blind, monitor="own")
    # Rank 0 names the ModelCheckpoint that this fit lacks.
    with pytest.warns(UserWarning, match="monitor=first") if os.environ["RANK"] == "0" else nullcontext():
        trained([resumed], 7, by_metric.best_model_path)
    missing = tw.ModelCheckpoint(str(folder / "missing"), monitor="second")
    with pytest.raises(ValueError, match="ModelCheckpoint follows 'second', which was not logged") as caught:
        trained([missing], 1)
    return {
        "time": [Path(path).name for path in by_time.state_dict()["best_k_models"]],
        "metric": by_metric.best_model_path,
        "resumed": resumed.state_dict(),
        "first": by_first.state_dict(),
        "missing": str(caught.value),
    }


def test_two_ranks_save_alike(tmp_path: Path) -> None:
    first, second = run_job(two_ranks, 2, tmp_path)
    assert first == second
    assert first["time"]
    assert sorted(first["time"]) == names(tmp_path / "time")
    assert names(tmp_path / "metric") == ["step=2.ckpt"]
    assert first["resumed"]["best_model_path"] == first["metric"]
    assert first["first"]["best_model_score"] == 35.0
    assert names(tmp_path / "first") == ["step=36.ckpt"]
    assert not (tmp_path / "missing").exists()


def test_of_two_runs_in_one_folder_the_newer_is_the_last(tmp_path: Path) -> None:
    run(tmp_path, [1.0])
    newer = run(tmp_path, [1.0])
    assert newer.last_model_path.endswith("epoch=0-step=11-v1.ckpt")
    assert find_checkpoints(str(tmp_path))[-1].path == newer.last_model_path


def test_checkpoint_counts_the_steps_of_two_optimizers(tmp_path: Path) -> None:
    """One step in the first batch and two in the others: the number of steps is odd after every batch."""

    class Two(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.zero_grad()
            self.manual_backward(loss_of(self.net, batch))
            first.step()
            if self.trainer.global_step > 1:
                second.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[each].parameters(), 0.1) for each in (0, -1)]

    callback = tw.ModelCheckpoint(str(tmp_path), "{step}", save_top_k=-1, every_n_train_steps=6)
    whole = end(train(callback, module=Two, max_epochs=1))
    assert names(tmp_path) == ["step=13.ckpt", "step=19.ckpt", "step=7.ckpt"]
    again = tw.ModelCheckpoint(str(tmp_path / "again"), "{step}", save_top_k=-1, every_n_train_steps=6)
    assert_equal(end(train(again, module=Two, max_epochs=1, ckpt_path=str(tmp_path / "step=7.ckpt"))), whole)
    assert names(tmp_path / "again") == ["step=13.ckpt", "step=19.ckpt"]
