"""Preparation: the arguments of a call, checked, and a module and its optimizers made ready for the training loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from trainwright.arguments import foreign_hint
from trainwright.checkpoint.reader import Verify
from trainwright.data.datamodule import DataModule
from trainwright.engine.memory_estimate import warn_of_memory
from trainwright.engine.optimizers import read_optimizers, use_fused
from trainwright.engine.prepared import PreparedOptimizer
from trainwright.engine.script_settings import checked_fresh
from trainwright.errors import a_type_of
from trainwright.module import Module, is_overridden
from trainwright.overrides import overridden
from trainwright.rank_zero import rank_zero_info, rank_zero_warn
from trainwright.strategies.base import Clipping, Optimization
from trainwright.tensor_names import is_compiled
from trainwright.trainer.optimization import closure_is_wanted
from trainwright.trainer.run import Run
from trainwright.trainer.sources import LoaderSource, find_source, read_datamodule, read_step
from trainwright.trainer.training_run import TrainingRun

OWN_PARTS = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step",
    "on_validation_model_zero_grad",
)  # fmt: skip
"""The parts of a step that a module may override."""


def prepare_fit(run: TrainingRun) -> None:
    """Wrap the module and make its optimizers (ValueError for settings that its optimization rules out). Collective."""
    settings, engine, module = run.settings, run.engine, run.module
    is_manual = not module.automatic_optimization
    if is_manual and (settings.accumulate_grad_batches > 1 or settings.gradient_clip_val):
        raise ValueError(
            "accumulate_grad_batches and gradient_clip_val need automatic optimization, but this module has "
            "automatic_optimization = False. Accumulate and clip in training_step, and leave them at their defaults, in "
            "trainwright launch and its config too."
        )
    arguments = read_step(module, "training_step")
    if arguments.pulls and settings.accumulate_grad_batches > 1:
        raise ValueError(
            f"accumulate_grad_batches={settings.accumulate_grad_batches} counts batches, but training_step takes them from "
            "dataloader_iter itself. Leave it at 1 and take several batches in a step."
        )
    engine.take_seed()
    engine.precision.reset()
    run.prepare_module(module)
    optimization = engine.strategy.resolve(
        Optimization(not is_manual, settings.clip_norm, settings.clip_value, settings.accumulate_grad_batches)
    )
    engine.prepare_module(module, optimization)
    run.prepare(optimization.accumulate, find_validation(run))  # setup() may have added hooks
    # Loaders that the call was given are checked before anything is run. Hooks are called when it is their turn.
    if run.source.owner is None:
        run.data.load()
        if run.validation is not None and run.validation.source.owner is None:
            run.validation.load()
    gives_closure = prepare_optimizers(run)
    overrides = {name: with_log_context(run, name) for name in OWN_PARTS if is_overridden(name, module, Module)}
    clipping = Clipping.needed(optimization.clip_norm, optimization.clip_value)
    run.plan_loop(arguments, clipping, overrides, gives_closure=gives_closure)


def prepare_optimizers(run: TrainingRun) -> bool:
    """Make the module's optimizers and schedulers, and return whether the optimizer's step gets a closure. Collective."""
    engine, module, is_manual = run.engine, run.module, not run.module.automatic_optimization
    returned = run.profiler.timed(module.configure_optimizers, "[module] configure_optimizers")()
    makes_none = returned is None and engine.strategy.capabilities.makes_optimizer
    optimizers, schedulers = ([], []) if makes_none else read_optimizers(returned, is_manual=is_manual)
    if not is_manual and len(optimizers) > 1:
        raise ValueError(
            f"configure_optimizers returned {len(optimizers)} optimizers, but automatic optimization steps one. Set "
            "automatic_optimization = False in the module and step them in training_step."
        )
    engine.replaced.update(optimizers)
    if run.settings.fused_optimizers:
        for optimizer in optimizers:
            use_fused(optimizer, [module])
    wrapped = engine.prepare_optimizers(optimizers)
    run.take_schedulers(schedulers)
    warn_of_memory(engine, module, optimizers)

    before = run.announce_step if is_manual else None
    prepared = [
        PreparedOptimizer(engine, each, before_step=before, after_step=run.count_step, has_loss=not is_manual)
        for each in wrapped
    ]
    run.take_optimizers(wrapped, prepared)
    return not is_manual and bool(optimizers) and closure_is_wanted(run.accumulate, engine, optimizers[0])


def with_log_context(run: TrainingRun, name: str) -> Callable[..., Any]:
    """Return a method of the module that may log as a hook may."""
    method = run.profiler.timed(getattr(run.module, name), f"[module] {name}")

    def call(*args: Any, **kwargs: Any) -> Any:
        collector = run.logbook.collector
        if collector is None:
            return method(*args, **kwargs)
        outer = collector.enter_hook(name)
        try:
            return method(*args, **kwargs)
        finally:
            collector.enter_hook(outer)

    return call


def find_validation(run: TrainingRun) -> LoaderSource | None:
    """Return the source of the validation loaders. None if there are none, or with limit_val_batches=0."""
    module, datamodule = run.module, run.datamodule
    source = find_source("validation", run.given_validation, datamodule, module, "val_dataloaders", "fit")
    # The limit is the same on every rank, while a single rank may have no batch.
    has_step = is_overridden("validation_step", module, Module)
    if not source.is_defined or run.settings.limit_val_batches == 0:
        if has_step and not source.is_defined:
            rank_zero_info("%s has a validation_step, but fit has no validation data.", type(module).__name__)
        return None
    if not has_step:
        rank_zero_warn(
            f"there are validation loaders, but {type(module).__name__} has no validation_step, so fit does not validate. "
            "Define it, or do not pass the loaders.",
            stacklevel=2,
        )
        return None
    return source


class Request(NamedTuple):
    """The arguments of a call."""

    call: str
    module: Module
    loaders: Any
    datamodule: DataModule | None
    source: LoaderSource
    ckpt_path: str | os.PathLike[str] | None
    verify: Verify
    fresh: tuple[str, ...] = ()


def check_module(module: Any, needed: list[str], call: str) -> None:
    """Raise TypeError unless it is a Module with the methods that the call needs."""
    if module is None:
        raise TypeError(
            f"trainer.{call} was given no module, and none was run before. Pass an instance of trainwright.Module."
        )
    if isinstance(module, type):
        raise TypeError(f"trainer.{call} was given the class {module.__name__}. Pass an instance of it.")
    if not isinstance(module, Module):
        hint = foreign_hint(module)
        if is_compiled(module):
            hint = " Pass the module itself, and compile=True to the Trainer: it compiles the submodules that the steps call."
        elif not hint and isinstance(module, nn.Module):
            hint = " Subclass trainwright.Module, or use trainwright.Accelerator in your own loop."
        raise TypeError(
            f"trainer.{call} was given {a_type_of(module)}. Expected an instance of trainwright.Module.{hint}"
        )
    missing = [name for name in needed if not is_overridden(name, module, Module)]
    if missing:
        raise TypeError(f"trainer.{call} needs {' and '.join(missing)}, which {type(module).__name__} does not define.")
    if not hasattr(module, "_trainer"):
        raise TypeError(f"{type(module).__name__}.__init__ did not call super().__init__(). Call it first.")


def read_call(
    call: str, stage: str, module: Any, needed: list[str], loaders: Any, datamodule: Any, argument: str, *options: Any
) -> Request:
    """Return the request of a call. Reject a module or data that it cannot use (TypeError, ValueError)."""
    check_module(module, needed, call)
    loaders, datamodule = read_datamodule(loaders, datamodule, argument, call)
    source = find_source(stage, loaders, datamodule, module, argument, call)
    if not source.is_defined:
        source.load()  # raises the error
    return Request(call, module, loaders, datamodule, source, *options)


def read_fit(model: Any, loaders: Any, datamodule: Any, ckpt_path: Any, verify: Verify, fresh: Any) -> Request:
    """Return the request of a fit."""
    fresh = checked_fresh(fresh, ckpt_path)
    if ckpt_path == "auto":
        ckpt_path = overridden("fit", "ckpt_path", ckpt_path)
    needed, options = ["training_step", "configure_optimizers"], (ckpt_path, verify, fresh)
    return read_call("fit", "train", model, needed, loaders, datamodule, "train_dataloaders", *options)


def read_evaluation(
    latest: Run, call: str, stage: str, model: Any, loaders: Any, ckpt_path: Any, datamodule: Any, verify: Verify
) -> Request:
    """Return the request of an evaluation.

    Without a module, evaluate the module of the `latest` run, with the weights of its best checkpoint if there is one.
    """
    best = next((each.best_model_path for each in latest.checkpoint_callbacks if each.best_model_path), "")
    if model is None and ckpt_path is None and best:
        ckpt_path = "best"
        latest.trainer.print(f"trainer.{call} was given no module: it takes the best checkpoint, {best}")
    if ckpt_path in ("", "best") and not best:
        if latest.settings.fast_dev_run and latest.module is not None:
            latest.trainer.print(
                f"trainer.{call}: fast_dev_run saves no checkpoint, so the weights in memory are taken."
            )
            ckpt_path = None
        ckpt_path = overridden(call, "ckpt_path", ckpt_path)
    if model is None:  # then the call is about the latest run, and so about its data
        model = latest.module
        if loaders is None and datamodule is None:
            datamodule = latest.datamodule
    needed = [] if stage == "predict" else [f"{stage}_step"]
    return read_call(call, stage, model, needed, loaders, datamodule, "dataloaders", ckpt_path, verify)
