"""A whole run and a run that resumes within an epoch end with the same weights, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from small import QUIET, assert_equal
from torch import Tensor

import trainwright as tw


class Saves(tw.Callback):
    """Saves at one step, after the hook of the module."""

    priority = -10

    def __init__(self, path: Path, step: int, trained_only: bool) -> None:
        self.path, self.step, self.trained_only = path, step, trained_only

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path, trained_only=self.trained_only)


def check_resume(
    make_module: Callable[[], tw.Module],
    make_loader: Callable[[], Any],
    path: Path,
    *,
    step: int = 3,
    trained_only: bool = False,
    **settings: Any,
) -> dict[str, Tensor]:
    """Train two epochs, and again from the checkpoint at a step. Compare, and return the weights. Collective."""

    def trained(**kwargs: Any) -> dict[str, Tensor]:
        module = make_module()
        options = {"max_epochs": 2, **QUIET, "devices": "auto", **settings}
        tw.Trainer(callbacks=[Saves(path, step, trained_only)], **options).fit(module, make_loader(), **kwargs)
        whole = tw.gather_module(module, all_ranks=True)
        return {name: value.detach().clone() for name, value in whole.state_dict().items()}

    at_once = trained()
    assert_equal(at_once, trained(ckpt_path=path))
    return at_once
