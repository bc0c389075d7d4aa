"""Preparation: a module and the trainer's settings made ready for the training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from trainwright.engine.compilation import compile_module
from trainwright.engine.fused import use_fused
from trainwright.engine.memory import warn_of_memory
from trainwright.engine.optimizers import read_optimizers
from trainwright.engine.prepared import PreparedOptimizer
from trainwright.engine.replica_settings import warn_of_unlike_settings
from trainwright.module import Module, is_overridden
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.base import Clipping, Optimization, StepResult
from trainwright.trainer.clock import IntervalClock
from trainwright.trainer.evaluate import Evaluation
from trainwright.trainer.optimization import closure_is_wanted
from trainwright.trainer.sources import LoaderSource, find_transfer
from trainwright.trainer.steps import read_step
from trainwright.trainer.training_data import TrainData
from trainwright.trainer.training_run import TrainingRun

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer

OWN_PARTS = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step",
    "on_validation_model_zero_grad",
)  # fmt: skip
"""What a module may do in its own way within a step."""


def prepare_fit(
    trainer: Trainer, module: Module, source: LoaderSource, validation: Evaluation | None, saves_end: bool
) -> TrainingRun:
    """Wrap the module, make its optimizers, and gather what the loop reads. Collective.

    Raises:
        ValueError: settings that this module's kind of optimization cannot follow.
    """
    settings, engine = trainer.settings, trainer.engine
    automatic = module.automatic_optimization
    if not automatic and (settings.accumulate_grad_batches > 1 or settings.gradient_clip_val):
        raise ValueError(
            "accumulate_grad_batches and gradient_clip_val are automatic optimization's, but this module has "
            "automatic_optimization = False; accumulate and clip in training_step, and leave them at their defaults."
        )
    arguments = read_step(module, "training_step")
    if arguments.pulls and settings.accumulate_grad_batches > 1:
        raise ValueError(
            f"accumulate_grad_batches={settings.accumulate_grad_batches} counts batches, but training_step takes them from "
            "dataloader_iter itself; leave it at 1 and take several batches in a step."
        )
    engine.take_seed()
    engine.precision.reset()
    prepare_module(trainer, module)
    optimization = engine.strategy.resolve(
        Optimization(automatic, settings.clip_norm, settings.clip_value, settings.accumulate_grad_batches)
    )
    if optimization.accumulate != settings.accumulate_grad_batches:
        trainer.accumulate_grad_batches = optimization.accumulate
    engine.prepare_module(module, optimization)
    trainer.train_data = data = TrainData(
        source,
        engine,
        settings,
        trainer.state,
        {**trainer.loader_options, "in_order": bool(trainer.given_settings.overfit_batches)},
        validates=validation is not None,
        pulls=arguments.pulls,
        note=trainer.stages.note_training,
    )
    trainer.run = run = TrainingRun(
        trainer=trainer,
        engine=engine,
        module=module,
        hooks=trainer.hooks,
        progress=trainer.state.progress,
        state=trainer.state,
        validation_clock=_validation_clock(trainer),
        data=data,
        validation=validation,
        saves_end=saves_end,
        is_manual=not automatic,
        optimizer=None,
        schedulers=[],
        accumulate=optimization.accumulate,
        clipping=Clipping.needed(optimization.clip_norm, optimization.clip_value),
        transfer=find_transfer(engine, module, trainer.datamodule),
        takes_index=arguments.takes_index,
        pulls=arguments.pulls,
        own={name: _heard(trainer, module, name) for name in OWN_PARTS if is_overridden(name, module, Module)},
    )
    # Given loaders are looked at before anything is run; hooks are called when it is their turn.
    if source.owner is None:
        data.load()
        if validation is not None and validation.source.owner is None:
            validation.load()
    _prepare_optimizers(run)
    warn_of_unlike_settings(module, module.hparams, engine.ranks)
    return run


def _validation_clock(trainer: Trainer) -> IntervalClock | None:
    seconds = trainer.settings.validation_seconds
    return None if seconds is None else IntervalClock(seconds, trainer.sync_point("validation"))


def prepare_module(trainer: Trainer, module: Module) -> None:
    """Do to a module what the settings ask for before it is placed: synchronised batch norm, compilation."""
    settings, engine = trainer.settings, trainer.engine
    if settings.sync_batchnorm and engine.world_size > 1:
        if engine.device.type == "cpu":
            raise ValueError(
                "sync_batchnorm=True needs GPUs: torch's SyncBatchNorm does not compute on the CPU; leave it at False."
            )
        nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    if settings.compile:
        options = settings.compile if isinstance(settings.compile, dict) else {}
        trainer.compiled = compile_module(module, options)
        if not trainer.compiled.modules:
            rank_zero_warn(
                f"compile= has nothing to compile: {type(module).__name__} has no submodule with a forward; "
                "put the network into one.",
                stacklevel=2,
            )


def _prepare_optimizers(run: TrainingRun) -> None:
    """Make the module's optimizers and schedulers, and have the strategy prepare them. Collective."""
    trainer, engine, module, state = run.trainer, run.engine, run.module, run.state
    returned = module.configure_optimizers()
    makes_none = returned is None and engine.strategy.makes_optimizer
    optimizers, run.schedulers = ([], []) if makes_none else read_optimizers(returned)
    trainer.lr_scheduler_configs = run.schedulers
    if not run.is_manual and len(optimizers) > 1:
        raise ValueError(
            f"configure_optimizers returned {len(optimizers)} optimizers, but automatic optimization steps one; set "
            "automatic_optimization = False in the module and step them in training_step."
        )
    if trainer.settings.fused_optimizers:
        for optimizer in optimizers:
            use_fused(optimizer, [module])
    trainer.optimizers = engine.prepare_optimizers(optimizers)
    warn_of_memory(engine, module, optimizers)

    def count(result: StepResult) -> None:
        if run.is_manual:
            state.step += 1
            state.skipped_steps += result.skipped
            run.window.drop()
            state.holds_gradients = False
        else:
            run.step_results.append(result)  # counted when optimizer_step has returned

    def tell(optimizer: Optimizer) -> None:
        with engine.precision.step_context():  # where a step of automatic optimization calls it too
            engine.strategy.finalize(optimizer)
            run.hooks.call("on_before_optimizer_step", optimizer)

    before = tell if run.is_manual and run.before_step else None
    trainer.prepared_optimizers = [
        PreparedOptimizer(engine, each, before_step=before, after_step=count) for each in trainer.optimizers
    ]
    if not run.is_manual and trainer.optimizers:
        run.optimizer = trainer.optimizers[0]
        if optimizers and closure_is_wanted(run.accumulate, engine, optimizers[0]):
            run.own["closure"] = True
    run.has_own_step = bool(run.own.keys() & {"optimizer_step", "configure_gradient_clipping", "closure"})
    if run.is_manual and not trainer.optimizers:
        rank_zero_warn(
            "automatic_optimization is False and configure_optimizers returned no optimizer: nothing is trained.",
            stacklevel=2,
        )


def _heard(trainer: Trainer, module: Module, name: str) -> Callable[..., Any]:
    """Return a method of the module that is a hook to log in."""
    method = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        collector = trainer.logbook.collector
        if collector is None:
            return method(*args, **kwargs)
        outer = collector.enter_hook(name)
        try:
            return method(*args, **kwargs)
        finally:
            collector.enter_hook(outer)

    return call
