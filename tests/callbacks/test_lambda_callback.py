"""LambdaCallback: functions at hooks, and nothing at the others."""

from __future__ import annotations

from typing import Any

import pytest
from small import QUIET, Classifier, make_loader

import trainwright as tw
from trainwright.callbacks.base import HOOKS, LambdaCallback
from trainwright.module import is_overridden


def test_functions_are_called_where_they_were_given() -> None:
    seen: list[Any] = []
    callback = LambdaCallback(
        setup=lambda trainer, module, stage: seen.append(stage),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: seen.append(batch_idx),
        on_train_epoch_end=lambda trainer, module: seen.append(trainer.current_epoch),
        on_fit_end=None,
    )
    tw.Trainer(max_epochs=1, limit_train_batches=2, callbacks=[callback], **QUIET).fit(Classifier(), make_loader())
    assert seen == ["fit", 0, 1, 0]
    overridden = {name for name in HOOKS if is_overridden(name, callback, tw.Callback)}
    assert overridden == {"setup", "on_train_batch_end", "on_train_epoch_end"}


def test_every_hook_may_be_given() -> None:
    LambdaCallback(**{name: lambda *args: None for name in HOOKS})
    assert {"setup", "teardown", "on_exception", "on_save_checkpoint", "on_predict_batch_end"} <= set(HOOKS)


def test_lambda_callback_rejects_unknown_hooks() -> None:
    with pytest.raises(
        TypeError, match=r"'on_train_batch_stop', which is not a hook; .* Did you mean 'on_train_batch_st"
    ):
        LambdaCallback(on_train_batch_stop=print)
    with pytest.raises(TypeError, match="on_fit_start=3 is an int; expected a function or None"):
        LambdaCallback(on_fit_start=3)  # type: ignore[arg-type]
