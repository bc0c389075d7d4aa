"""State that a callback loads from a checkpoint right after its setup lasts until the training begins."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, make_loader

import trainwright as tw
from trainwright.callbacks.early_stopping import EarlyStopping
from trainwright.callbacks.learning_rate_monitor import LearningRateMonitor
from trainwright.callbacks.timer import Timer


def loaded(kind: type[Any], state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Return a callback that takes its state as a resumed run lets it: after setup, before on_fit_start."""

    class Loaded(kind):  # type: ignore[misc]
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            super().setup(trainer, module, stage)
            if stage == "fit":
                self.load_state_dict(state)

    return Loaded(*args, **kwargs)


def fit(*callbacks: tw.Callback, **settings: Any) -> tw.Trainer:
    trainer = tw.Trainer(callbacks=list(callbacks), **{**QUIET, "max_epochs": 2, **settings})
    trainer.fit(Classifier(), make_loader(8), make_loader(4))
    return trainer


def test_early_stopping_keeps_a_state_that_is_loaded_early() -> None:
    state = {**EarlyStopping("val_loss").state_dict(), "wait_count": 2, "best_score": 0.0}
    callback = loaded(EarlyStopping, state, "val_loss", patience=3)
    assert fit(callback).current_epoch == 1
    assert callback.wait_count == 3


def test_timer_keeps_a_state_that_is_loaded_early() -> None:
    callback = loaded(Timer, {"time_elapsed": {"train": 5000.0}}, {"hours": 1})
    assert fit(callback).global_step == 0
    assert 5000.0 <= callback.time_elapsed() < 5060.0


def test_model_checkpoint_keeps_a_state_that_is_loaded_early(tmp_path: Path) -> None:
    earlier = tw.ModelCheckpoint(str(tmp_path), monitor="val_loss")
    fit(earlier, enable_checkpointing=True, max_epochs=1)
    state = {**earlier.state_dict(), "best_k_models": {earlier.best_model_path: -1.0}}
    callback = loaded(tw.ModelCheckpoint, state, str(tmp_path), monitor="val_loss")
    fit(callback, enable_checkpointing=True)
    assert callback.best_k_models == {earlier.best_model_path: torch.tensor(-1.0)}
    assert [path.name for path in tmp_path.iterdir()] == [Path(earlier.best_model_path).name]


def test_rates_that_setup_has_loaded_continue(tmp_path: Path) -> None:
    class Keeps(LearningRateMonitor):
        """Lets a resumed run go on with the rates of the run before."""

        def state_dict(self) -> dict[str, Any]:
            return {"lrs": self.lrs}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.lrs = state["lrs"]

    callback = loaded(Keeps, {"lrs": {"lr-AdamW": [math.pi]}}, "epoch")
    trainer = fit(callback, logger=tw.CSVLogger(str(tmp_path)))
    assert callback.lrs == {"lr-AdamW": [math.pi, 0.05, 0.05]}
    del type(callback).setup  # a fit that begins anew
    trainer.fit(Classifier(), make_loader(8))
    assert callback.lrs == {"lr-AdamW": [0.05, 0.05]}


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_a_hook_may_look_at_it(hook: str) -> None:
    state = {**EarlyStopping("val_loss").state_dict(), "wait_count": 1}
    callback, seen = loaded(EarlyStopping, state, "val_loss"), []

    class Looks(tw.Callback):
        pass

    setattr(Looks, hook, lambda self, trainer, module: seen.append(callback.wait_count))
    fit(Looks(), callback)
    assert seen == [1]
