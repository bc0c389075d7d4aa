"""GradientAccumulationScheduler: the windows of the epochs, and rejected settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import QUIET, Classifier, assert_equal, make_loader, weights

import trainwright as tw
from trainwright.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler


class Steps(tw.Callback):
    """Keeps the number of steps at every epoch's end."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.steps.append(trainer.global_step)


def run(epochs: int, *callbacks: tw.Callback, ckpt_path: str | None = None, **settings: Any) -> tw.Trainer:
    trainer = tw.Trainer(max_epochs=epochs, callbacks=list(callbacks), **{**QUIET, **settings})
    trainer.fit(Classifier(), make_loader(), ckpt_path=ckpt_path)
    return trainer


def test_every_epoch_has_its_window(tmp_path: Path) -> None:
    """11 batches an epoch: 11 steps, then 3 of windows of 4, then 6 of windows of 2."""
    schedule, steps = GradientAccumulationScheduler({1: 4, 3: 2}), Steps()
    checkpoint = tw.ModelCheckpoint(str(tmp_path), save_top_k=-1)
    whole = run(4, schedule, steps, checkpoint, enable_checkpointing=True)
    assert steps.steps == [11, 14, 17, 23]
    assert whole.accumulate_grad_batches == 1  # as it was: the next run may have another schedule
    resumed = run(
        4, GradientAccumulationScheduler({1: 4, 3: 2}), ckpt_path=list(checkpoint.state_dict()["best_k_models"])[1]
    )
    assert resumed.global_step == 23
    assert_equal(weights(resumed.lightning_module), weights(whole.lightning_module))
    fixed = run(2, accumulate_grad_batches=4)
    scheduled = run(2, GradientAccumulationScheduler({0: 4}))
    assert_equal(weights(fixed.lightning_module), weights(scheduled.lightning_module))


def test_accumulation_scheduler_rejects_wrong_settings() -> None:
    for scheduling, error, match in (
        ({}, TypeError, "pass a dict of epoch and number of batches"),
        ([4], TypeError, "pass a dict of epoch and number of batches"),
        ({"0": 4}, ValueError, "'0' as epoch; expected an integer of at least 0"),
        ({0: 2.0}, ValueError, "2.0 as number of batches; expected an integer of at least 1"),
        ({-1: 2}, ValueError, "-1 as epoch"),
        ({0: 0}, ValueError, "0 as number of batches"),
    ):
        with pytest.raises(error, match=match):
            GradientAccumulationScheduler(scheduling)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exclude each other"):
        run(1, GradientAccumulationScheduler({0: 2}), accumulate_grad_batches=2)

    class Manual(Classifier):
        automatic_optimization = False

    trainer = tw.Trainer(max_epochs=1, callbacks=[GradientAccumulationScheduler({0: 2})], **QUIET)
    with pytest.raises(ValueError, match="needs automatic optimization"):
        trainer.fit(Manual(), make_loader())


def test_what_it_says_of_itself() -> None:
    schedule = GradientAccumulationScheduler({4: 2, 8: 1})
    assert [schedule.get_accumulate_grad_batches(epoch) for epoch in (0, 3, 4, 7, 8, 99)] == [1, 1, 2, 2, 1, 1]
    assert schedule.going_to_accumulate_grad_batches()
    assert not GradientAccumulationScheduler({0: 1}).going_to_accumulate_grad_batches()


@pytest.mark.parametrize("batches", [0, 1.5, True])
def test_a_number_that_is_no_window_is_refused(batches: Any) -> None:
    trainer = tw.Trainer(**QUIET)
    with pytest.raises(
        ValueError, match=f"trainer.accumulate_grad_batches={batches} is not accepted. Set it to an integer"
    ):
        trainer.accumulate_grad_batches = batches
    assert trainer.accumulate_grad_batches == 1
