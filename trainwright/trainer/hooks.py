"""Hooks: the timeline of a run, and who is called at each point of it, resolved once.

    fit      setup > on_fit_start > (a checkpoint is restored)
               sanity check: on_sanity_check_start > validation as below > on_sanity_check_end
               on_train_start
               each epoch: on_train_epoch_start
                 each batch: on_train_batch_start
                   at a window's start: on_before_zero_grad > zero_grad
                   training_step > on_before_backward > backward > on_after_backward
                   at a window's end: on_before_optimizer_step > clip > step > step-wise schedulers
                   on_train_batch_end
                 epoch-wise schedulers > validation, where due
                 on_train_epoch_end > the metrics are reduced > on_train_epoch_end of what runs last
               on_train_end > on_fit_end > teardown
    validation, test
             on_*_start > on_*_epoch_start
               each batch: on_*_batch_start > *_step > on_*_batch_end
             on_*_epoch_end > the metrics are reduced > on_*_end
    an exception ends the run: on_exception > teardown

Callbacks are called in list order and before the module; those that `runs_last` (checkpoints) come after the others, and
at an epoch's end after the module and the reduction, so that they judge what was logged. A hook that nobody overrides is
an empty tuple and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trainwright.callbacks.base import Callback
from trainwright.module import Module, is_overridden

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer

HOOKS = tuple(name for name in vars(Callback) if name in ("setup", "teardown") or name.startswith("on_"))
JUDGED = "on_train_epoch_end, last"
"""The hook table's name for the on_train_epoch_end of the callbacks that run last."""


class HookTable:
    """For each hook, the bound methods to call."""

    def __init__(self, trainer: Trainer, module: Module, callbacks: Sequence[Callback]) -> None:
        ordered = sorted(callbacks, key=lambda callback: callback.runs_last)
        self._calls: dict[str, tuple[Callable[..., Any], ...]] = {}
        for name in HOOKS:
            overriding = [callback for callback in ordered if is_overridden(name, callback, Callback)]
            if name == "on_train_epoch_end":
                last = [callback for callback in overriding if callback.runs_last]
                self._calls[JUDGED] = tuple(partial(getattr(each, name), trainer, module) for each in last)
                overriding = [callback for callback in overriding if not callback.runs_last]
            calls: list[Callable[..., Any]] = [partial(getattr(each, name), trainer, module) for each in overriding]
            if hasattr(Module, name) and is_overridden(name, module, Module):
                calls.append(getattr(module, name))
            self._calls[name] = tuple(reversed(calls)) if name == "teardown" else tuple(calls)

    def __getitem__(self, name: str) -> tuple[Callable[..., Any], ...]:
        return self._calls[name]

    def call(self, name: str, *args: Any) -> None:
        """Call everyone who waits for this hook, in order."""
        for hook in self._calls[name]:
            hook(*args)
