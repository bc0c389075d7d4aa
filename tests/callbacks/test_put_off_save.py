"""A save that was due beside another callback's is made by the run that goes on, if the first was killed between the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import QUIET, Classifier, assert_equal, make_loader, weights

import trainwright as tw

KILLED_AT = 2


class Killed(Exception):
    pass


class DiesBeforeItsSave(tw.ModelCheckpoint):
    """Ends the run between the saves of another callback and of this one, at the same step."""

    def on_save_point(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == KILLED_AT and trainer.resume_source is None:
            raise Killed
        super().on_save_point(trainer, module)


def run(folder: Path, second: type[tw.ModelCheckpoint], ckpt_path: str | None = None) -> Any:
    tw.seed_everything(3)
    callbacks = [
        tw.ModelCheckpoint(str(folder), every_n_train_steps=1),
        second(str(folder / "second"), "{epoch}-{step}", every_n_train_steps=KILLED_AT, save_top_k=-1),
    ]
    settings = {**QUIET, "enable_checkpointing": True, "accumulate_grad_batches": 3, "val_check_interval": 4}
    trainer = tw.Trainer(max_epochs=2, callbacks=callbacks, **settings)
    module = Classifier(dropout=0.3)
    trainer.fit(module, make_loader(), make_loader(10), ckpt_path=ckpt_path)  # 11 batches, 4 steps an epoch
    return weights(module), [Path(path).name for path in callbacks[1].state_dict()["best_k_models"]]


def test_a_save_that_was_due_is_made_by_the_resumed_run(tmp_path: Path) -> None:
    whole, kept = run(tmp_path / "whole", tw.ModelCheckpoint)
    assert kept[0] == f"epoch=0-step={KILLED_AT}.ckpt"
    with pytest.raises(Killed):
        run(tmp_path / "part", DiesBeforeItsSave)
    resumed, kept_then = run(tmp_path / "part", DiesBeforeItsSave, f"{tmp_path}/part/epoch=0-step={KILLED_AT}.ckpt")
    assert_equal(resumed, whole)
    assert kept_then == kept
    again, _ = run(tmp_path / "again", tw.ModelCheckpoint, f"{tmp_path}/part/second/{kept[0]}")
    assert_equal(again, whole)
