"""EarlyStopping: why and when it ends a run, and a resumed run ends at the same step."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, Classifier, fit, make_loader

import trainwright as tw
from trainwright.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason


class Scored(Classifier):
    """Logs a given score in every validation, and another at the end of every training epoch."""

    def __init__(self, scores: list[float], train_scores: list[float] | None = None) -> None:
        super().__init__()
        self.scores, self.train_scores, self.checks = scores, train_scores, 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.scores[min(self.checks, len(self.scores) - 1)])

    def on_validation_end(self) -> None:
        self.checks += not self.trainer.sanity_checking

    def on_train_epoch_end(self) -> None:
        if self.train_scores is not None:
            self.log("train_score", self.train_scores[self.current_epoch])


def run(
    callback: EarlyStopping,
    scores: list[float],
    *callbacks: tw.Callback,
    train_scores: list[float] | None = None,
    has_validation: bool = True,
    ckpt_path: str | None = None,
    **settings: Any,
) -> tw.Trainer:
    trainer = tw.Trainer(callbacks=[callback, *callbacks], **{**QUIET, "max_epochs": 8, **settings})
    loaders = [make_loader(), make_loader(4)] if has_validation else [make_loader()]
    module = Scored(scores, train_scores)
    module.checks = 0 if ckpt_path is None else 3
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(("kwargs", "scores", "checks", "reason", "best"), [
    ({"patience": 2}, [3.0, 2.0, 2.5, 2.4, 1.0], 4, "PATIENCE_EXHAUSTED", 2.0),
    ({"patience": 2}, [3.0, 2.0, 2.5, 1.9, 2.0, 2.0], 6, "PATIENCE_EXHAUSTED", 1.9),
    ({"patience": 2, "min_delta": 0.5}, [3.0, 2.6, 2.5], 3, "PATIENCE_EXHAUSTED", 3.0),
    ({"patience": 1, "mode": "max", "min_delta": 0.5}, [3.0, 3.6, 4.1], 3, "PATIENCE_EXHAUSTED", 3.6),
    ({}, [3.0, math.nan], 2, "NON_FINITE_METRIC", 3.0),
    ({"check_finite": False, "patience": 2}, [3.0, math.nan, math.nan], 3, "PATIENCE_EXHAUSTED", 3.0),
    ({"stopping_threshold": 1.0}, [3.0, 1.0, 0.9], 3, "STOPPING_THRESHOLD", 1.0),
    ({"divergence_threshold": 5.0}, [3.0, 5.0, 5.1], 3, "DIVERGENCE_THRESHOLD", 3.0),
    ({"mode": "max", "divergence_threshold": 1.0}, [3.0, 0.5], 2, "DIVERGENCE_THRESHOLD", 3.0),
    ({"patience": 9}, [3.0, 2.0], 8, "NOT_STOPPED", 2.0),
])  # fmt: skip
def test_early_stopping_ends_a_run(
    kwargs: dict[str, Any], scores: list[float], checks: int, reason: str, best: float, capsys: Any
) -> None:
    callback = EarlyStopping("score", verbose=True, **kwargs)
    trainer = run(callback, scores)
    assert trainer.current_epoch == checks
    assert callback.stopping_reason is EarlyStoppingReason[reason]
    assert callback.best_score.item() == best
    if reason == "NOT_STOPPED":
        assert callback.stopping_reason_message is None
        return
    assert callback.stopped_epoch == checks - 1
    assert trainer.should_stop
    assert callback.stopping_reason_message
    assert callback.stopping_reason_message.endswith("; stopping.")
    assert callback.stopping_reason_message in capsys.readouterr().err


def test_the_reason_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    for verbose, stopped in ((False, 1), (True, 1), (False, 0)):
        callback = EarlyStopping("score", patience=1 if stopped else 9, verbose=verbose)
        run(callback, [3.0], min_epochs=4 if not verbose else None)
        assert capsys.readouterr().err.count("score has not improved for 1 checks") == stopped


def test_training_metrics_are_followed_with_and_without_validation() -> None:
    """A training metric is there at the epoch's end only, after the validation."""
    for has_validation in (True, False):
        trainer = run(
            EarlyStopping("train_score", patience=1),
            [0.0],
            train_scores=[3.0, 2.0, 2.0, 1.0],
            has_validation=has_validation,
        )
        assert trainer.current_epoch == 3


def test_checks_follow_validations() -> None:
    callback = EarlyStopping("score", patience=2)
    assert run(callback, [3.0, 3.0, 3.0], check_val_every_n_epoch=2).current_epoch == 6
    # Two validations an epoch: the third one, in the middle of the second epoch, is one too many.
    callback = EarlyStopping("score", patience=2)
    trainer = run(callback, [3.0, 3.0, 3.0, 1.0], val_check_interval=0.5)
    assert (callback.stopped_epoch, trainer.global_step) == (1, 11 + 5)
    # At epochs' ends the same runs count otherwise.
    callback = EarlyStopping("score", patience=2, check_on_train_epoch_end=True)
    assert run(callback, [3.0, 3.0, 3.0, 1.0], val_check_interval=0.5).current_epoch == 4


def test_a_run_that_stops_within_an_epoch_makes_no_check_there(tmp_path: Path) -> None:
    for check_on_train_epoch_end in (None, False):
        callback = EarlyStopping("score", patience=1, check_on_train_epoch_end=check_on_train_epoch_end)
        saves = tw.ModelCheckpoint(str(tmp_path / str(check_on_train_epoch_end)), save_top_k=-1)
        trainer = run(callback, [3.0, 4.0], saves, max_steps=15, enable_checkpointing=True)
        assert trainer.callback_metrics["score"] == 3.0
        assert (callback.wait_count, callback.stopping_reason) == (0, EarlyStoppingReason.NOT_STOPPED)
        assert saves.last_model_path.endswith("epoch=1-step=15.ckpt")


def test_a_resumed_run_stops_where_the_other_one_does(tmp_path: Path) -> None:
    scores = [3.0, 4.0, 4.0, 4.0, 1.0]
    checkpoints = [tw.ModelCheckpoint(str(tmp_path), save_top_k=-1)]
    settings = {"enable_checkpointing": True}
    run(EarlyStopping("score", patience=3), scores, *checkpoints, max_epochs=3, **settings)
    callback = EarlyStopping("score", patience=3)
    trainer = run(callback, scores, tw.ModelCheckpoint(str(tmp_path), save_top_k=-1), ckpt_path="last", **settings)
    assert trainer.current_epoch == 4
    assert (callback.wait_count, callback.best_score.item(), callback.stopped_epoch) == (3, 3.0, 3)
    # The checkpoint of the end knows that the run was stopped. A new fit starts to count again.
    again = EarlyStopping("score", patience=3)
    again.load_state_dict(callback.state_dict())
    assert again.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    assert torch.equal(again.best_score, callback.best_score)
    assert run(again, [3.0, 2.0, 1.0], max_epochs=3).current_epoch == 3
    assert (again.wait_count, again.stopping_reason) == (0, EarlyStoppingReason.NOT_STOPPED)


def test_missing_metric_raises_or_is_skipped(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(ValueError, match=r"EarlyStopping follows 'other', which was not logged; there are .*score"):
        run(EarlyStopping("other"), [1.0])
    with pytest.warns(UserWarning, match="monitors 'other', which was not logged; the check is skipped") as caught:
        assert run(EarlyStopping("other", strict=False), [1.0], max_epochs=3).current_epoch == 3
    assert len(caught) == 1


@pytest.mark.parametrize(("kwargs", "error", "match"), [
    ({"mode": "least"}, ValueError, "choose from min, max"),
    ({"patience": -1}, ValueError, "an integer of at least 0"),
    ({"patience": 1.5}, ValueError, "an integer of at least 0"),
    ({"min_delta": -0.1}, ValueError, "a number of at least 0"),
    ({"monitor": None}, TypeError, "the name of a metric"),
])  # fmt: skip
def test_early_stopping_rejects_wrong_settings(kwargs: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        EarlyStopping(**{"monitor": "score", **kwargs})


def two_ranks(folder: Path) -> dict[str, Any]:
    class RankScored(Classifier):
        """Its step values differ by rank: rank 0 stops getting better, rank 1 does not."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("own", 1.0 if self.global_rank == 0 else -float(self.global_step))
            self.log("first" if self.global_rank == 0 else "second", -float(self.global_step))
            return loss

    def trained(*callbacks: tw.Callback) -> int:
        trainer = fit(RankScored(), max_epochs=6, callbacks=list(callbacks), devices=2)
        return trainer.current_epoch

    callback, first = EarlyStopping("own", patience=2), EarlyStopping("first")
    second = EarlyStopping("second", strict=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epochs = trained(first, second, callback)
    with pytest.raises(ValueError, match="EarlyStopping follows 'second', which was not logged") as error:
        trained(EarlyStopping("second"))
    return {
        "epochs": epochs,
        "waited": callback.wait_count,
        "best": [float(each.best_score) for each in (callback, first, second)],
        "warned": sum("the check is skipped" in str(each.message) for each in caught),
        "error": str(error.value),
    }


def test_two_ranks_stop_together(tmp_path: Path) -> None:
    """Rank 0's value decides, also if only one rank has logged the metric."""
    first, second = run_job(two_ranks, 2, tmp_path)
    assert (first.pop("warned"), second.pop("warned")) == (1, 0)
    assert first == second
    assert (first["epochs"], first["waited"], first["best"]) == (3, 2, [1.0, -17.0, math.inf])


def test_a_stop_after_a_validation_within_an_epoch_is_saved_once_among_the_best(tmp_path: Path) -> None:
    def make() -> tw.ModelCheckpoint:
        return tw.ModelCheckpoint(tmp_path, "{step}", monitor="score", mode="max", save_top_k=2)

    settings = {"enable_checkpointing": True, "val_check_interval": 3, "max_epochs": 2}
    saving = make()
    trainer = run(EarlyStopping("score", patience=0), [1.0, 3.0, 4.0], saving, **settings)
    assert trainer.global_step == 6
    assert {Path(path).name for path in saving.best_k_models} == {"step=3.ckpt", "step=6.ckpt"}
    again = make()
    trainer = run(EarlyStopping("score", patience=0), [9.0], again, ckpt_path="auto", **settings)
    assert trainer.global_step == 6
    assert {Path(path).name for path in again.best_k_models} == {"step=3.ckpt", "step=6.ckpt"}
