"""Hooks: the timeline of a run, and the HookTable, which finds at the start of a call who is called at each point.

    always   configure_callbacks > on_tune (a fit that resumes nothing) > prepare_data > setup (the datamodule's first)
             > configure_model > (a checkpoint is opened: on_load_checkpoint > load_state_dict of callbacks and datamodule).
    fit      configure_optimizers > on_fit_start > configure_lr_scheduler
             > (weights, optimizers and counters are taken from the checkpoint: load_sharded_state_dict).
               sanity check, unless the run resumes: on_sanity_check_start > val_dataloader > validation as below
                 > on_sanity_check_end.
               train_dataloader > on_resume_start (a resumed run) > on_train_start > on_resume_end (a resumed run).
               every epoch: on_train_epoch_start > configure_lr_scheduler
                 every batch: on_before_batch_transfer > transfer_batch_to_device > on_after_batch_transfer.
                   on_train_batch_start
                   training_step
                   at a window's start: on_before_zero_grad > optimizer_zero_grad
                   on_before_backward > backward > on_after_backward
                   at a window's end: on_before_optimizer_step > configure_gradient_clipping > optimizer_step
                     > lr_scheduler_step of the step-wise schedulers.
                   on_train_batch_end > on_save_point > validation, where due within the epoch.
                 lr_scheduler_step of the epoch-wise schedulers > validation, where due
                 the metrics are reduced > on_train_epoch_end > its logged values are reduced > lr_scheduler_step of
                 monitoring schedulers > on_train_epoch_end of callbacks with a negative priority > on_save_point.
                 instead, if the run stops within the epoch: on_train_epoch_stop > on_save_point
                 > on_train_epoch_end, by priority as above.
               on_before_train_end (unless a signal stops the run) > on_train_end > on_fit_end > teardown.
    validation, test, predict
             (validation in fit: on_validation_model_zero_grad) > on_*_model_eval > on_*_start > on_*_epoch_start
               every batch: the three of the transfer > on_*_batch_start > *_step > on_*_batch_end.
             the metrics are reduced > on_*_epoch_end > its logged values are reduced
             > on_*_end > on_save_point (validation) > on_*_model_train.
    a checkpoint is written: state_dict > has_requested_stop (if should_stop is set) > sharded_state_dict > on_save_checkpoint
             > on_checkpoint_saved (if a ModelCheckpoint has saved it).
    an exception ends the run: on_exception > teardown.
    the loggers are closed, except after predict: on_run_end.

Callbacks are called before the module, the highest `priority` first, and callbacks of equal priority in list order. With a
negative priority (EarlyStopping and progress bars, then checkpoints) they come after the module in on_train_batch_end,
on_validation_end and on_train_epoch_end. A checkpoint callback decides in these hooks and saves at the save point after them,
so that a checkpoint records which other saves are due. A run that is killed between two saves makes the second one when it
resumes.
A hook that is not overridden is an empty tuple and costs nothing. Only callbacks and the datamodule have on_exception, and
only callbacks have on_checkpoint_saved. Names without on_ are the module's or the datamodule's, except setup, teardown,
state_dict, configure_lr_scheduler, has_requested_stop and the hooks of the sharded state, which callbacks have.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import chain
from typing import Any

from trainwright.callbacks.base import HOOKS, Callback
from trainwright.distributed.ranks import Ranks
from trainwright.module import Module, is_overridden
from trainwright.module_hooks import ModuleHooks
from trainwright.profilers.base import Profiler
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.logbook import Logbook

EPOCH_ENDS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end")
Hooks = tuple[Callable[..., Any], ...]
MODULE_HOOKS = tuple(name for name in vars(ModuleHooks) if not name.startswith("_"))
EARLIER_HOOKS = {f"{stage}_epoch_end": f"on_{stage}_epoch_end" for stage in ("validation", "test")}
EARLIER_HOOKS["training_epoch_end"] = "on_train_epoch_end"
"""Hooks of earlier trainers without which results would be missing, and their replacements."""
RENAMED_HOOKS = {
    "configure_sharded_model": "configure_model",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
}
"""Other hooks of earlier trainers."""
STEP_PARTS = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step",
    "on_validation_model_zero_grad",
)  # fmt: skip
"""The parts of a step that a module may override. They may log as hooks may."""
UNTIMED_HOOKS = ("on_tune", "on_run_end")
"""Hooks called before the profiler is set up, or after it is closed."""


class HookTable:
    """The bound methods to call for every hook, timed by the profiler if there is one."""

    def __init__(self, trainer: Any, module: Module | None, logbook: Logbook, profiler: Profiler | None = None) -> None:
        self._trainer, self._module, self._logbook, self._profiler = trainer, module, logbook, profiler
        ordered = sorted(trainer.callbacks, key=_priority_of, reverse=True)
        calls = {name: self._of_callbacks(name, ordered) + self._of_module(name) for name in HOOKS}
        save_point = tuple(partial(_without_arguments, hook) for hook in calls["on_save_point"])
        early = [callback for callback in ordered if callback.priority >= 0]
        late = ordered[len(early) :]
        for name in ("on_train_batch_end", "on_validation_end"):
            first, last = self._of_callbacks(name, early), self._of_callbacks(name, late)
            calls[name] = first + self._of_module(name) + last + save_point
        # The reduction of the epoch's metrics comes between these two.
        name = "on_train_epoch_end"
        calls[name] = self._of_callbacks(name, early) + self._of_module(name)
        self._late_epoch_end = self._of_callbacks(name, late)
        self._calls = calls
        readers = [callback for callback in ordered if callback.reads_outputs]
        self.outputs_are_read = bool(
            self._of_callbacks("on_train_batch_end", readers) + self._of_module("on_train_batch_end")
        )
        """Whether a training step's outputs have to be made ready for on_train_batch_end."""
        self.reduced_early = frozenset(name for name in EPOCH_ENDS if self._calls[name])
        """The ends of epochs whose hooks see the epoch's values. After `agree` they are the same on every rank."""

    def _of_callbacks(self, name: str, callbacks: Iterable[Callback]) -> Hooks:
        def bound(callback: Callback) -> Any:
            hook = partial(getattr(callback, name), self._trainer, self._module)
            return self._timed(name, hook, f"[callback] {type(callback).__name__}")

        return tuple(bound(callback) for callback in callbacks if is_overridden(name, callback, Callback))

    def _of_module(self, name: str) -> Hooks:
        module = self._module
        if module is None or not hasattr(Module, name) or not is_overridden(name, module, Module):
            return ()
        return (self._timed(name, getattr(module, name), "[module]"),)

    def _timed(self, name: str, hook: Callable[..., Any], owner: str) -> Callable[..., Any]:
        """Return a hook that the profiler, if there is one, measures, and that takes an evaluation's arguments."""
        if self._profiler is not None and name not in UNTIMED_HOOKS:
            separator = " " if owner == "[module]" else "."
            hook = self._profiler.timed(hook, f"{owner}{separator}{name}")
        if name.endswith(("_batch_start", "_batch_end")) and "train" not in name:
            # The arguments before the loader's index: batch and batch_idx, at a batch's end outputs too.
            hook = _with_loader_index(hook, 2 if name.endswith("_start") else 3)
        return hook

    def find_step_parts(self) -> dict[str, Callable[..., Any]]:
        """Return calls of the parts of a step that the module overrides, also by an attribute that setup() has set."""
        self._calls |= {name: self._of_module(name) for name in STEP_PARTS}
        return {name: partial(self.call, name) for name in STEP_PARTS if self._calls[name]}

    def agree(self, ranks: Ranks, call: str) -> None:
        """Reduce early on every rank if one rank has a hook that reads the values. Collective."""
        names = ranks.exchange(sorted(self.reduced_early), call)
        self.reduced_early = frozenset(chain(*names))

    def __getitem__(self, name: str) -> Hooks:
        return self._calls[name]

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call all overrides of this hook, in order, and return their results."""
        calls = self._calls[name]
        if not calls:
            return []
        collector, returned = self._logbook.collector, list[Any]()
        if collector is None:
            return [hook(*args) for hook in calls]
        outer = collector.enter_hook(name)
        try:
            for hook in calls:
                returned.append(hook(*args))  # a comprehension is one more frame
        finally:
            collector.enter_hook(outer)
        return returned

    def call_late(self) -> None:
        """Call on_train_epoch_end of the callbacks with a negative priority, once the epoch's metrics are reduced."""
        for hook in self._late_epoch_end:
            hook()


def _without_arguments(hook: Callable[[], Any], *_: Any) -> None:
    hook()


def _priority_of(callback: Callback) -> int:
    """Return a callback's priority (TypeError if it is not an int)."""
    if not isinstance(callback.priority, int):
        raise TypeError(f"{type(callback).__name__}.priority is {callback.priority!r}. Set an int, such as -10.")
    return callback.priority


def check_hooks(owner: Module | Callback) -> None:
    """Warn of methods of a user's class whose names are almost those of hooks.

    Raises:
        TypeError: it defines a hook of earlier trainers without which results would be missing.
    """
    base: type = Module if isinstance(owner, Module) else Callback
    for name, method in inspect.getmembers_static(type(owner), inspect.isfunction):
        if hasattr(base, name):
            continue
        who = f"{type(owner).__name__}.{name}"
        if name in EARLIER_HOOKS:
            raise TypeError(f"{who} is never called. Define {EARLIER_HOOKS[name]} instead, and keep outputs on self.")
        is_own = method.__module__.partition(".")[0] in ("trainwright", "torch")
        meant = "" if is_own else RENAMED_HOOKS.get(name) or nearest_hook(name, base)
        if meant and not is_overridden(meant, owner, base):
            rank_zero_warn(
                f"{who} is not a hook, so it is never called; did you mean {meant}? If it is a method of your own, give it "
                "another name.",
                stacklevel=2,
            )


@cache
def nearest_hook(name: str, base: type) -> str:
    """Return the hook whose name is almost this one, or ""."""
    known = HOOKS if base is Callback else MODULE_HOOKS
    similar = [hook for hook in known if hook.startswith("on_")] if name.startswith("on") else []
    return next(iter(difflib.get_close_matches(name, similar, n=1, cutoff=0.8)), "")


def _with_loader_index(call: Callable[..., Any], without: int) -> Callable[..., Any]:
    """Return a hook that is given dataloader_idx=0 where there is one loader, if it takes no call without."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return call
    if sum(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters) <= without:
        return call
    return lambda *args: call(*args) if len(args) > without else call(*args, 0)
