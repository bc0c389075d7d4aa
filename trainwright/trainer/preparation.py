"""Preparation: a module, a loader and the trainer's settings made ready for the training loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.optim import LBFGS, Optimizer

from trainwright.data.loaders import ShardedLoader
from trainwright.engine.compilation import compile_children
from trainwright.engine.optimizers import read_optimizers
from trainwright.engine.prepared import PreparedOptimizer
from trainwright.module import Module
from trainwright.precision import StepResult
from trainwright.strategies.base import Optimization
from trainwright.trainer.evaluate import limited
from trainwright.trainer.fit import TrainingRun

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer


def prepare_fit(trainer: Trainer, module: Module, train_dataloaders: Iterable[Any]) -> TrainingRun:
    """Shard the data, wrap the module, make its optimizers, and gather what the loop reads. Collective.

    Raises:
        ValueError: no batch to train on, or settings that this module's kind of optimization cannot follow.
    """
    settings, engine, state = trainer.settings, trainer.engine, trainer.state
    automatic = module.automatic_optimization
    if not automatic and (settings.accumulate_grad_batches > 1 or settings.gradient_clip_val is not None):
        raise ValueError(
            "accumulate_grad_batches and gradient_clip_val are automatic optimization's, but this module has "
            "automatic_optimization = False; accumulate and clip in training_step, and leave them at their defaults."
        )
    loader = _prepare_loader(trainer, train_dataloaders)
    limit = settings.limit_train_batches
    engine.prepare_module(
        module, Optimization(automatic, settings.clip_norm, settings.clip_value, settings.accumulate_grad_batches)
    )
    if settings.compile:
        num_compiled = compile_children(module, settings.compile if isinstance(settings.compile, dict) else {})
        if num_compiled == 0:
            warnings.warn(
                f"compile= has nothing to compile: {type(module).__name__} has no submodule with a forward; "
                "put the network into one.",
                stacklevel=4,
            )
    optimizers, trainer.lr_scheduler_configs = read_optimizers(module.configure_optimizers())
    if automatic:
        _check_optimizers(optimizers)
    trainer.optimizers = engine.prepare_optimizers(optimizers)

    def count(result: StepResult) -> None:
        state.step += 1
        state.skipped_steps += result.skipped

    trainer.prepared_optimizers = [PreparedOptimizer(engine, each, after_step=count) for each in trainer.optimizers]
    return TrainingRun(
        trainer=trainer,
        engine=engine,
        module=module,
        hooks=trainer.hooks,
        state=state,
        loader=loader,
        optimizer=trainer.optimizers[0] if automatic else None,
        schedulers=trainer.lr_scheduler_configs,
        num_batches=limited(loader.exact_length, limit) if loader.exact_length is not None else None,
        most_batches=trainer.num_training_batches if limit is not None else None,
        accumulate=settings.accumulate_grad_batches,
        clip=engine.clipper(settings.clip_norm, settings.clip_value),
    )


def _prepare_loader(trainer: Trainer, train_dataloaders: Iterable[Any]) -> ShardedLoader:
    """Begin a run's data and precision anew, and share out its loader, of one length on every rank. Collective."""
    engine = trainer.engine
    engine.take_seed()
    engine.precision.reset()
    loader = engine.prepare_loader(train_dataloaders, "train")
    limit = trainer.settings.limit_train_batches
    trainer.num_training_batches = limited(loader.length, limit)
    own = str(loader.length).encode()
    lengths = [text.decode() for text in engine.agreement.exchange(own, timeout_seconds=engine.timeout_seconds)]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"the ranks have training loaders of different lengths ({', '.join(lengths)} batches), so some would wait for "
            "ever; give every rank the same data, which is shared out then."
        )
    if trainer.num_training_batches == 0:
        raise ValueError(
            "the training loader has no batch (its dataset is empty, drop_last dropped all, or limit_train_batches is too "
            "small); give it data."
        )
    return loader


def _check_optimizers(optimizers: list[Optimizer]) -> None:
    """Refuse what automatic optimization cannot step (ValueError)."""
    if len(optimizers) > 1:
        raise ValueError(
            f"configure_optimizers returned {len(optimizers)} optimizers, but automatic optimization steps one; set "
            "automatic_optimization = False in the module and step them in training_step."
        )
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(
            "configure_optimizers returned LBFGS, which calls the training step several times in each of its own; that is not "
            "there yet. Choose another optimizer, or set automatic_optimization = False and step it in training_step."
        )
