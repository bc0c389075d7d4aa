"""Hooks: the timeline of a run, and the HookTable of who is called at each point of the loop, found once a call.

    each     configure_callbacks > prepare_data > setup (the datamodule's first) > configure_model
             > (a checkpoint is opened: on_load_checkpoint > load_state_dict of callbacks and datamodule)
    fit      configure_optimizers > on_fit_start > (weights, optimizers and counters are taken from the checkpoint)
               sanity check, unless the run resumes: on_sanity_check_start > val_dataloader > validation as below
                 > on_sanity_check_end
               train_dataloader > on_train_start
               each epoch: on_train_epoch_start
                 each batch: on_before_batch_transfer > transfer_batch_to_device > on_after_batch_transfer
                   on_train_batch_start
                   training_step
                   at a window's start: on_before_zero_grad > optimizer_zero_grad
                   on_before_backward > backward > on_after_backward
                   at a window's end: on_before_optimizer_step > configure_gradient_clipping > optimizer_step
                     > lr_scheduler_step of the step-wise schedulers
                   on_train_batch_end > validation, where due within the epoch
                 lr_scheduler_step of the epoch-wise schedulers > validation, where due
                 the metrics are reduced > on_train_epoch_end > what it logged is reduced
                 > lr_scheduler_step of those that monitor one > on_train_epoch_end of what runs last
               on_train_end > on_fit_end > teardown
    validation, test, predict
             (validation in fit: on_validation_model_zero_grad) > on_*_model_eval > on_*_start > on_*_epoch_start
               each batch: the three of the transfer > on_*_batch_start > *_step > on_*_batch_end
             the metrics are reduced > on_*_epoch_end > what it logged is reduced > on_*_end > on_*_model_train
    a checkpoint is written: state_dict > on_save_checkpoint
    an exception ends the run: on_exception > teardown

Callbacks are called in list order and before the module; those that `runs_last` (checkpoints) come after the others, in
on_train_batch_end and on_validation_end after the module too, and at an epoch's end also after the reduction: they score and
save the others' results. ModelCheckpoints only decide in these hooks and save once all callbacks have run. A checkpoint
records which other saves are due, so a run that is killed between two saves makes the second one when it resumes. If a run
stops within an epoch, ModelCheckpoints come first and save the state after the latest batch.
A hook that is not overridden is an empty tuple and costs nothing. Only callbacks and the datamodule have on_exception. Names
without on_ are the module's or the datamodule's, except setup, teardown and state_dict, which callbacks have too.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

from trainwright.arguments import check_takes
from trainwright.callbacks.base import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.distributed.ranks import Ranks
from trainwright.module import Module, is_overridden
from trainwright.module_hooks import ModuleHooks
from trainwright.profilers.base import Profiler
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.logbook import Logbook

EPOCH_ENDS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end")
HOOKS = tuple(name for name in vars(Callback) if name in ("setup", "teardown") or name.startswith("on_"))
MODULE_HOOKS = tuple(name for name in vars(ModuleHooks) if not name.startswith("_"))
SILENT = (
    "training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "configure_callbacks",
    "configure_model", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step",
    "val_dataloader", "transfer_batch_to_device", "setup", "teardown",
)  # fmt: skip
"""Further methods of a module of which a misspelt one is missed by nothing."""
SAVE = "on_train_epoch_end, saving"
"""The hook table's name for the on_train_epoch_end of ModelCheckpoints, which come last of all."""
RUN_LAST = "on_train_epoch_end, last"
"""The table's name for the same hook of the other callbacks that run last."""
SAVED_AFTER = ("on_train_batch_end", "on_validation_end")
"""Hooks in which the callbacks that run last come after the module: they save what it has done there."""


class HookTable:
    """For each hook, the bound methods to call, timed by the profiler if there is one; no module hooks without a module."""

    def __init__(
        self,
        trainer: Any,
        module: Module | None,
        callbacks: Sequence[Callback],
        logbook: Logbook,
        profiler: Profiler | None = None,
    ) -> None:
        # sorted is stable, so both kinds stay in the order of the list.
        ordered = sorted(callbacks, key=lambda callback: callback.runs_last)
        self._logbook = logbook
        self._calls: dict[str, tuple[Callable[..., Any], ...]] = {}

        def bound(callback: Callback, name: str) -> Callable[..., Any]:
            call = partial(getattr(callback, name), trainer, module)
            return call if profiler is None else profiler.timed(call, f"[callback] {type(callback).__name__}.{name}")

        def saving(checkpoint: ModelCheckpoint) -> Callable[..., Any]:
            def call(*_: Any) -> None:
                checkpoint.save_due(trainer)

            return (
                call if profiler is None else profiler.timed(call, f"[callback] {type(checkpoint).__name__}.save_due")
            )

        checkpoints = [callback for callback in ordered if isinstance(callback, ModelCheckpoint)]
        saves = {name: [saving(each) for each in checkpoints] for name in ("on_train_epoch_end", "on_validation_end")}
        saves["on_train_batch_end"] = [saving(each) for each in checkpoints if each.watches_batches]
        for name in HOOKS:
            overriding = [callback for callback in ordered if is_overridden(name, callback, Callback)]
            if name == "on_train_epoch_end":
                last = [callback for callback in overriding if callback.runs_last]
                decisions = [bound(each, name) for each in last if isinstance(each, ModelCheckpoint)]
                self._calls[SAVE] = (*decisions, *saves[name])
                self._calls[RUN_LAST] = tuple(
                    bound(each, name) for each in last if not isinstance(each, ModelCheckpoint)
                )
                overriding = [callback for callback in overriding if not callback.runs_last]
            after = [each for each in overriding if each.runs_last] if name in SAVED_AFTER else []
            calls: list[Callable[..., Any]] = [bound(each, name) for each in overriding if each not in after]
            if module is not None and hasattr(Module, name) and is_overridden(name, module, Module):
                own = getattr(module, name)
                calls.append(own if profiler is None else profiler.timed(own, f"[module] {name}"))
            calls += [bound(each, name) for each in after]
            calls += saves[name] if name in SAVED_AFTER else []
            if name.endswith(("_batch_start", "_batch_end")) and "train" not in name:
                # The arguments before the loader's index: batch and batch_idx, at a batch's end outputs too.
                calls = [_with_loader_index(each, 2 if name.endswith("_start") else 3) for each in calls]
            self._calls[name] = tuple(calls)
        readers = [
            each for each in ordered if is_overridden("on_train_batch_end", each, Callback) and each.reads_outputs
        ]
        self.outputs_are_read = bool(readers) or (
            module is not None and is_overridden("on_train_batch_end", module, Module)
        )
        """Whether a training step's outputs have to be made ready for on_train_batch_end."""
        self.reduced_early = frozenset(name for name in EPOCH_ENDS if self._calls[name])
        """The ends of epochs whose hooks see the epoch's values; the same on every rank after `agree`."""

    def agree(self, ranks: Ranks, call: str) -> None:
        """Reduce early on every rank if one of them has a hook that looks at the values. Collective."""
        self.reduced_early = frozenset(chain(*ranks.exchange(sorted(self.reduced_early), call)))

    def __getitem__(self, name: str) -> tuple[Callable[..., Any], ...]:
        return self._calls[name]

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call everything that overrides this hook, in order, and return what they return."""
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


def check_hooks(owner: Module | Callback) -> None:
    """Check the hooks that a user's class defines, and warn of methods whose names are almost those of hooks.

    Raises:
        TypeError: a hook does not take what it is given.
    """
    base: type = Module if isinstance(owner, Module) else Callback
    hooks = MODULE_HOOKS if base is Module else HOOKS
    for kind in type(owner).__mro__:
        if kind.__module__.partition(".")[0] in ("trainwright", "torch", "builtins"):
            continue
        for name, method in vars(kind).items():
            if not inspect.isfunction(method):
                continue
            if name in hooks:
                call, given = getattr(owner, name), list(inspect.signature(getattr(base, name)).parameters.values())[1:]
                least = [each.name for each in given if each.default is each.empty]
                is_enough = _with_loader_index(call, len(least)) is call
                check_takes(
                    f"{type(owner).__name__}.{name}", call, least if is_enough else [each.name for each in given]
                )
            elif (
                not hasattr(base, name)
                and (meant := nearest_hook(name, base))
                and not is_overridden(meant, owner, base)
            ):
                rank_zero_warn(
                    f"{type(owner).__name__}.{name} is not a hook, so it is never called; did you mean {meant}? If it is a "
                    "method of your own, give it another name.",
                    stacklevel=2,
                )


@cache
def nearest_hook(name: str, base: type) -> str:
    """Return the hook whose name is almost this one, or ""."""
    known = HOOKS if base is Callback else (*MODULE_HOOKS, *SILENT)
    is_on = name.startswith("on")
    similar = [each for each in known if (is_on if each.startswith("on_") else each in SILENT)]
    return next(iter(difflib.get_close_matches(name, similar, n=1, cutoff=0.8 if is_on else 0.85)), "")


def _with_loader_index(call: Callable[..., Any], without: int) -> Callable[..., Any]:
    """Return a hook that is given dataloader_idx=0 where there is one loader, if it takes no call without."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return call
    if sum(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters) <= without:
        return call
    return lambda *args: call(*args) if len(args) > without else call(*args, 0)
