"""Timer: the end of a training whose time is over, alike on all ranks, and the measured times."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from jobs import run_job
from small import QUIET, Classifier, fit, make_loader

import trainwright as tw
from trainwright.callbacks.timer import Timer


class Slow(Classifier):
    """Its steps take time from a given one on."""

    def __init__(self, slow_from: int, seconds: float = 0.3) -> None:
        super().__init__()
        self.slow_from, self.seconds = slow_from, seconds

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step >= self.slow_from:
            time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)


def test_a_step_and_an_epoch_are_where_it_ends(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("trainwright.callbacks.timer.time", clock)

    class Passes(tw.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            clock.now += 60.0

    for interval, steps in (("step", 4), ("epoch", 11)):
        timer = Timer("00:00:04:00", interval)
        trainer = fit(Classifier(), max_epochs=3, callbacks=[Passes(), timer])
        assert trainer.global_step == steps
        assert f"training has reached its time limit after 0:{steps:02d}:00" in capsys.readouterr().err
        assert timer.time_elapsed() == 60.0 * steps
        assert timer.time_remaining() == 240.0 - 60.0 * steps


def test_the_time_before_a_resume_counts(tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    timer = Timer({"seconds": 3600}, verbose=False)
    trainer = fit(Slow(0, 0.02), callbacks=[timer])
    trainer.save_checkpoint(path)
    used = timer.time_elapsed()
    assert used == timer.time_elapsed() > 0.2  # it stands still after the run
    # The budget is used up: no further batch is trained.
    trainer = fit(Classifier(), ckpt_path=path, max_epochs=2, callbacks=[Timer({"seconds": used / 2}, verbose=False)])
    assert trainer.global_step == 11
    timer = Timer(timedelta(hours=1))
    trainer = fit(Classifier(), ckpt_path=path, max_epochs=2, callbacks=[timer])
    assert trainer.global_step == 22
    assert used < timer.time_elapsed() < used + 60
    trainer.fit(Classifier(), make_loader())  # a fit that begins anew counts anew
    assert trainer.global_step == 22


def test_a_state_from_elsewhere_counts() -> None:
    """State loaded without a checkpoint of the run, once the fit has begun: its time counts here too."""
    loads = tw.LambdaCallback(on_fit_start=lambda *_: timer.load_state_dict({"time_elapsed": {"train": 3600.0}}))
    timer = Timer({"hours": 1}, verbose=False)
    trainer = fit(Classifier(), max_epochs=2, callbacks=[timer, loads])
    assert trainer.global_step == 0


def test_what_it_measures() -> None:
    timer = Timer()
    trainer = tw.Trainer(max_epochs=1, callbacks=[timer], **QUIET)
    assert timer.start_time() is None
    assert timer.time_remaining() is None
    trainer.fit(Classifier(), make_loader(), make_loader())
    trainer.test(Classifier(), make_loader())
    trainer.predict(Classifier(), make_loader())
    for stage in ("train", "validate", "test", "predict", "sanity_check"):
        start, end = timer.start_time(stage), timer.end_time(stage)
        assert timer.time_elapsed(stage) == end - start > 0


def test_timer_rejects_wrong_settings() -> None:
    with pytest.raises(ValueError, match="choose from step, epoch"):
        Timer("00:00:00:10", interval="batch")
    with pytest.raises(ValueError, match="12 hours"):
        Timer("12 hours")


def two_ranks(folder: Path) -> int:
    """Only the time of rank 1 is over, in the middle of an epoch."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    class Passes(Slow):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clock.now += 60.0
            return super().training_step(batch, batch_idx)

    with mock.patch("trainwright.callbacks.timer.time", clock):
        timer = Timer({"minutes": 3})
        trainer = tw.Trainer(max_epochs=200, devices=2, callbacks=[timer], **QUIET)
        if trainer.global_rank == 0:
            timer = Timer({"days": 1})
            trainer.callbacks[-1] = timer
        trainer.fit(Passes(3, 0.05), make_loader())
    return trainer.global_step


def test_two_ranks_stop_at_one_step(tmp_path: Path) -> None:
    first, second = run_job(two_ranks, 2, tmp_path)
    assert first == second
    assert 3 <= first < 200 * 6
