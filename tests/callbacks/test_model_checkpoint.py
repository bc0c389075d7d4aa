"""ModelCheckpoint: what it keeps, under which name, and what it never deletes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import QUIET, Classifier, make_loader

import trainwright as tw
from trainwright.checkpoint.store import latest_checkpoint


class Scored(Classifier):
    """Logs a given score each epoch."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = scores

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/score", self.scores[min(self.current_epoch, len(self.scores) - 1)])


def run(folder: Path, scores: list[float], ckpt_path: str | None = None, **kwargs: Any) -> tw.ModelCheckpoint:
    callback = tw.ModelCheckpoint(str(folder), **{"monitor": "val/score", **kwargs})
    trainer = tw.Trainer(max_epochs=len(scores), callbacks=[callback], **{**QUIET, "enable_checkpointing": True})
    trainer.fit(Scored(scores), make_loader(), make_loader(4), ckpt_path=ckpt_path)
    return callback


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("kwargs", "kept", "best"),
    [
        ({"save_top_k": 1}, [2], 2),
        ({"save_top_k": 2}, [2, 3], 2),
        ({"save_top_k": 2, "mode": "max"}, [1, 4], 1),
        ({"save_top_k": -1}, [0, 1, 2, 3, 4], 2),
        ({"save_top_k": 1, "save_last": True}, [2, 4], 2),
        ({"save_top_k": 0, "save_last": True}, [4], None),
        ({"save_top_k": 1, "monitor": None}, [4], 4),
        ({"save_top_k": 0}, [], None),
        ({"save_top_k": -1, "every_n_epochs": 2}, [1, 3], 3),
    ],
)
def test_what_is_kept(tmp_path: Path, kwargs: dict[str, Any], kept: list[int], best: int | None) -> None:
    callback = run(tmp_path / "kept", [3.0, 5.0, 1.0, 2.0, 4.0], **kwargs)
    expected = [f"epoch={epoch}-step={11 * (epoch + 1)}.ckpt" for epoch in kept]
    assert (names(tmp_path / "kept") if kept else []) == expected
    assert Path(callback.best_model_path).name == ("" if best is None else f"epoch={best}-step={11 * (best + 1)}.ckpt")
    if kept:
        assert callback.last_model_path or best is not None


def test_a_score_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    callback = run(tmp_path, [float("nan"), 2.0, float("-inf"), float("nan")], save_last=True)
    assert names(tmp_path) == ["epoch=1-step=22.ckpt", "epoch=3-step=44.ckpt"]
    assert callback.best_model_score == 2.0


def test_a_resumed_run_keeps_judging_where_it_was(tmp_path: Path) -> None:
    run(tmp_path, [1.0, 2.0], save_top_k=2)
    callback = run(tmp_path, [1.0, 2.0, 3.0, 0.5], ckpt_path="last", save_top_k=2)
    kept = {Path(path).name: score for path, score in callback.best_k_models.items()}
    assert kept == {"epoch=0-step=11.ckpt": 1.0, "epoch=3-step=44.ckpt": 0.5}
    # The checkpoint that the run was resumed from is left, though it is no longer among the best.
    assert set(names(tmp_path)) == {*kept, "epoch=1-step=22.ckpt"}


def test_names_and_versions(tmp_path: Path) -> None:
    kwargs = {"filename": "{epoch}-{val/score:.2f}", "save_top_k": -1}
    run(tmp_path, [0.5], **kwargs)
    run(tmp_path, [0.5], **kwargs)
    run(tmp_path, [0.5], **{**kwargs, "auto_insert_metric_name": False})
    assert names(tmp_path) == ["0-0.50.ckpt", "epoch=0-val_score=0.50-v1.ckpt", "epoch=0-val_score=0.50.ckpt"]
    with pytest.raises(ValueError, match="asks for 'accuracy', which was not logged; there are epoch, loss"):
        run(tmp_path, [0.5], filename="{accuracy}")


def test_a_metric_that_is_not_logged_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ModelCheckpoint follows 'acc', which was not logged; there are .*val/score"):
        run(tmp_path, [0.5], monitor="acc")


def test_a_step_value_can_be_followed(tmp_path: Path) -> None:
    class Stepwise(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("now", loss)
            return loss

    callback = tw.ModelCheckpoint(str(tmp_path), monitor="now")
    trainer = tw.Trainer(max_epochs=1, callbacks=[callback], **{**QUIET, "enable_checkpointing": True})
    trainer.fit(Stepwise(), make_loader())
    assert callback.best_model_score == trainer.callback_metrics["now"].item()


def test_weights_only_cannot_be_resumed(tmp_path: Path) -> None:
    callback = run(tmp_path, [1.0], save_weights_only=True)
    with pytest.raises(tw.CheckpointError, match="holds weights only"):
        run(tmp_path, [1.0, 2.0], ckpt_path=callback.best_model_path)


def test_a_failed_save_is_told_and_the_kept_ones_stay(tmp_path: Path) -> None:
    """The disk is full for the second save: the callback goes on knowing the first."""
    callback = tw.ModelCheckpoint(str(tmp_path / "kept"), save_top_k=-1, save_last=True)

    class Full(tw.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.engine.save = self.fail

        def fail(self, *args: Any, **kwargs: Any) -> None:
            raise tw.CheckpointError("no space left")

    trainer = tw.Trainer(max_epochs=3, callbacks=[callback, Full()], **{**QUIET, "enable_checkpointing": True})
    with pytest.raises(tw.CheckpointError, match="no space left"):
        trainer.fit(Scored([1.0]), make_loader(), make_loader(4))
    assert names(tmp_path / "kept") == ["epoch=0-step=11.ckpt"]
    assert Path(callback.last_model_path).name == Path(callback.best_model_path).name == "epoch=0-step=11.ckpt"


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"mode": "least"}, "choose from min, max"),
        ({"save_top_k": -2}, "or -1 for all"),
        ({"save_top_k": 3}, "needs a metric to judge by"),
        ({"every_n_epochs": 0}, "below 1"),
        ({"filename": "{epoch"}, "a brace without its pair"),
    ],
)
def test_refusals(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        tw.ModelCheckpoint(**kwargs)


def test_a_run_deletes_only_in_its_own_folder(tmp_path: Path) -> None:
    earlier = run(tmp_path / "a", [1.0, 2.0], save_top_k=2)
    run(tmp_path / "b", [1.0, 2.0, 0.5, 0.4], ckpt_path=earlier.last_model_path, save_top_k=1)
    assert names(tmp_path / "a") == ["epoch=0-step=11.ckpt", "epoch=1-step=22.ckpt"]
    assert names(tmp_path / "b") == ["epoch=3-step=44.ckpt"]


def test_the_source_is_kept_however_its_path_is_spelled(tmp_path: Path) -> None:
    earlier = run(Path("kept"), [2.0])
    source = str(Path(earlier.last_model_path).resolve())
    run(Path("kept"), [2.0, 1.0], ckpt_path=source)
    assert names(Path("kept")) == ["epoch=0-step=11.ckpt", "epoch=1-step=22.ckpt"]


def test_two_of_one_state_are_refused(tmp_path: Path) -> None:
    two = [tw.ModelCheckpoint(str(tmp_path / name)) for name in "ab"]
    with pytest.raises(ValueError, match="holds two of one state_key"):
        tw.Trainer(callbacks=two, **{**QUIET, "enable_checkpointing": True})


def test_of_two_runs_in_one_folder_the_newer_is_the_last(tmp_path: Path) -> None:
    run(tmp_path, [1.0])
    newer = run(tmp_path, [1.0])
    assert newer.last_model_path.endswith("epoch=0-step=11-v1.ckpt")
    entry = latest_checkpoint(str(tmp_path))
    assert entry is not None
    assert entry.path == newer.last_model_path
