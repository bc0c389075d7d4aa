"""Inputs: checks of what the Trainer and its calls are given, before anything is done with it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from torch import nn

from trainwright.arguments import foreign_hint
from trainwright.data.combined_loader import CombinedLoader, is_collection, is_read_once
from trainwright.errors import a_type_of
from trainwright.module import Module, is_overridden
from trainwright.paths import absolute
from trainwright.precision import Precision
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies import STRATEGIES, VARIANTS, Strategy
from trainwright.tensor_names import WRAPPER

GIVEN_OUTPUTS = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}
"""Hooks of earlier trainers that computed an epoch's metrics from all outputs, and what replaces them."""
REPLACED_HOOKS = {
    "training_step_end": "training_step",
    "validation_step_end": "validation_step",
    "test_step_end": "test_step",
    "configure_sharded_model": "configure_model",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_keyboard_interrupt": "on_train_end with trainer.interrupted (a Ctrl-C in fit) and on_exception",
}
"""Further hooks of earlier trainers, and what replaces them."""


def check_replaced_hooks(owner: Any) -> None:
    """Warn of hooks of earlier trainers, which are ignored; TypeError for one without which results would be missing."""
    for name, replacement in GIVEN_OUTPUTS.items():
        if callable(getattr(owner, name, None)):
            raise TypeError(
                f"{type(owner).__name__} defines {name}, which is never called. Define {replacement} instead (outputs of the "
                "steps are not kept: keep on self what you need)."
            )
    left = {name: new for name, new in REPLACED_HOOKS.items() if callable(getattr(owner, name, None))}
    if left:
        rank_zero_warn(
            f"{type(owner).__name__} defines {', '.join(left)} of an earlier version, never called now; what does the work "
            f"today: {', '.join(left.values())}.",
            stacklevel=2,
        )


def check_module(module: Any, needed: list[str], call: str) -> None:
    """Raise TypeError unless it is a Module with the methods that the call needs."""
    if module is None:
        raise TypeError(
            f"trainer.{call} was given no module, and none was run before. Pass an instance of trainwright.Module."
        )
    if isinstance(module, type) and issubclass(module, Module):
        raise TypeError(f"trainer.{call} was given the class {module.__name__}. Pass an instance of it.")
    if not isinstance(module, Module):
        hint = " Subclass trainwright.Module, or use trainwright.Accelerator in your own loop."
        hint = foreign_hint(module) or (hint if isinstance(module, nn.Module) else "")
        if isinstance(getattr(module, WRAPPER, None), Module):  # of torch.compile
            hint = " Pass the module itself, and compile=True to the Trainer: it compiles the submodules that the steps call."
        raise TypeError(
            f"trainer.{call} was given {a_type_of(module)}. Expected an instance of trainwright.Module.{hint}"
        )
    check_replaced_hooks(module)
    missing = [name for name in needed if not is_overridden(name, module, Module)]
    if missing:
        raise TypeError(f"trainer.{call} needs {' and '.join(missing)}, which {type(module).__name__} does not define.")
    may_predict = any(is_overridden(name, module, Module) for name in ("predict_step", "forward"))
    if call == "predict" and (not may_predict or module.predict_step is None):
        raise TypeError(
            f"trainer.predict needs predict_step, or forward for it to call; {type(module).__name__} defines neither."
        )
    if not hasattr(module, "_trainer"):
        raise TypeError(f"{type(module).__name__}.__init__ did not call super().__init__(). Call it first.")


def check_loader(loader: Any, argument: str, call: str, hook: str, is_read_once: bool) -> Any:
    """Return the loaders; TypeError for anything else, and for an iterator unless it `is_read_once`."""
    if loader is None:
        raise TypeError(
            f"trainer.{call} was given no {argument}. Pass a torch DataLoader, or an iterable of batches, or define {hook} on "
            "the module or on a DataModule."
        )
    if isinstance(loader, str) or not isinstance(loader, Iterable):  # a str is iterable
        raise TypeError(
            f"{argument} is {a_type_of(loader)}. Expected a torch DataLoader, an iterable of batches, or several of "
            f"them in a list, a dict or a CombinedLoader.{foreign_hint(loader)}"
        )
    once = iterators_of(loader)
    if once and not is_read_once:
        limit = {"train": "limit_train_batches", "val": "limit_val_batches"}.get(hook.partition("_")[0])
        raise TypeError(
            f"{argument} is or holds {a_type_of(once[0])}, which can be read only once, and this run may read it more "
            f"often. Pass a list, a DataLoader, or an object whose __iter__ starts again. With {limit}=<a number> each pass "
            "takes the next batches of it; max_epochs=1 reads training data once, and without val_check_interval validation "
            "data too."
        )
    return loader


def iterators_of(loader: Any) -> list[Any]:
    """Return the loaders among these that can be read only once: generators and other iterators."""
    parts = CombinedLoader(loader).flattened if is_collection(loader) else getattr(loader, "flattened", [loader])
    return [each for each in parts if is_read_once(each)]


def choose_precision(precision: Any, plugins: Any) -> Any:
    """Return the precision chosen by precision= or plugins=.

    Raises:
        ValueError: plugins= holds a strategy, or both choose a precision.
        TypeError: plugins= holds something unknown.
    """
    given = plugins if isinstance(plugins, (list, tuple)) else [] if plugins is None else [plugins]
    for plugin in given:
        if isinstance(plugin, str) and plugin in {*STRATEGIES, *VARIANTS}:
            raise ValueError(f"plugins={plugin!r} names a strategy. Pass strategy={plugin!r} instead.")
        if isinstance(plugin, Strategy):
            raise ValueError(f"plugins= holds {a_type_of(plugin)}. Pass it as strategy=.")
        if not isinstance(plugin, Precision):
            raise TypeError(
                f"plugins= holds {plugin!r}, {a_type_of(plugin)}. Expected a Precision. Pass a strategy as strategy=. "
                "Leave out environments, checkpoint IO and layer synchronisation: a job is detected, checkpoints have one "
                f"format, and sync_batchnorm=True synchronises.{foreign_hint(plugin)}"
            )
        if precision is not None:
            raise ValueError(
                f"precision={precision!r} and plugins={plugin!r} both choose a precision. Pass one of them."
            )
        precision = plugin
    return precision


def choose_root(default_root_dir: Any) -> str:
    """Return the absolute folder of a Trainer's files; TypeError unless it is a path or None."""
    if not isinstance(default_root_dir, (str, os.PathLike, type(None))):
        raise TypeError(
            f"default_root_dir={default_root_dir!r} is {a_type_of(default_root_dir)}. Expected a path, an fsspec URL "
            "or None for the working directory."
        )
    return absolute("." if default_root_dir is None else default_root_dir)


def check_compile(compile: Any, strategy: Strategy) -> None:
    """Raise ValueError for compile= under a strategy whose engine the compiler cannot follow."""
    if compile and not strategy.capabilities.takes_compile:
        raise ValueError(
            f"compile={compile!r} cannot hold under strategy={strategy.name!r} as it is set (DeepSpeed's stage 3 gathers "
            "parameters in hooks that the compiler does not follow). Leave compile out, or choose 'fsdp' or stage 2."
        )
