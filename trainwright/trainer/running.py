"""Running: what surrounds every run of a Trainer, from its parts' setup to their teardown, whatever happens between."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from trainwright.callbacks.base import Callback
from trainwright.checkpoint.foreign_formats import is_plain
from trainwright.checkpoint.reader import Verify
from trainwright.data.datamodule import DataModule
from trainwright.distributed.failures import is_secondary_failure
from trainwright.hyperparameters import logged_hyper_parameters
from trainwright.loggers import Logger, match_states, resume_loggers, start_loggers, withdraw_loggers
from trainwright.module import Module, is_overridden
from trainwright.profilers.instrumentation import instrument, is_measuring
from trainwright.trainer.checkpoint_choice import CheckpointSearch, Choice
from trainwright.trainer.evaluate import Evaluation
from trainwright.trainer.hooks import HookTable
from trainwright.trainer.inputs import check_module
from trainwright.trainer.locks import FolderLocks
from trainwright.trainer.logbook import Logbook
from trainwright.trainer.parts import with_the_modules
from trainwright.trainer.phase import Phase
from trainwright.trainer.preparation import prepare_module
from trainwright.trainer.resume import open_with_hooks, restore_weights
from trainwright.trainer.sources import find_source, find_transfer, read_datamodule
from trainwright.trainer.stage import Stage

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer


@contextmanager
def running(
    trainer: Trainer,
    module: Module,
    stage: str,
    datamodule: DataModule | None,
    choice: Choice,
    evaluation: Evaluation | None,
    stays: bool = False,
) -> Iterator[None]:
    """Set up what surrounds a run, and take it down whatever happens. Collective: call on every rank.

    Where the module `stays` prepared as the latest run has left it, the engine is not closed before.
    """
    engine, outcome, locks = trainer.engine, Outcome(), FolderLocks(trainer.engine.ranks, trainer.print)
    trainer.ckpt_path = choice.path
    trainer.module, trainer.datamodule = module, datamodule
    trainer.stop.note_end(None)
    trainer.state.progress.enter(Phase.OUTSIDE)
    profiler = trainer.profiler if is_measuring(trainer.profiler) else None
    outer = module._trainer
    with ExitStack() as stack:
        if outer is not None and outer.stage is not None:  # a hook of that one's run has made this call
            stack.callback(setattr, module, "trainer", outer)
        trainer.stage = stage
        stack.callback(_leave, trainer, outcome, evaluation)
        module.trainer = trainer
        if datamodule is not None:
            datamodule.trainer = trainer
        trainer.logbook = Logbook(trainer.loggers, engine, trainer.state)
        trainer.hooks = HookTable(trainer, module, trainer.callbacks, profiler)
        _agree_on_hooks(trainer)
        for callback in trainer.callbacks:
            callback.__dict__["_running_module"] = module
        if not stays:
            engine.close()
        stack.enter_context(engine.ranks.located_by(partial(_place, trainer)))
        if profiler is not None:
            stack.callback(instrument(engine, profiler))
        stack.callback(_withdraw_loggers, trainer, outcome)
        stack.callback(locks.release)
        for logger in reversed(trainer.loggers) if trainer.is_global_zero else ():
            stack.callback(_close_logger, trainer, logger, outcome)
        for hook in reversed(trainer.hooks["teardown"]):
            stack.callback(outcome.after, hook, stage)
        if datamodule is not None:
            stack.callback(outcome.after, datamodule.teardown, stage)
        try:
            _start_loggers(trainer, choice, locks)
            _set_up(trainer, module, stage, datamodule)
            yield
            engine.finish_save()
        except BaseException as error:
            outcome.error = error
            if trainer.run is not None:
                trainer.state.progress.fail(trainer.run.obstacle)
            trainer.stop.note_end(error)
            # One in flight can commit while every rank lives, whatever they raise; not where one has gone.
            outcome.after(engine.writer.drop if is_secondary_failure(error) else engine.finish_save)
            for hook in trainer.hooks["on_exception"]:
                outcome.after(hook, error)
            if datamodule is not None:
                outcome.after(datamodule.on_exception, error)
            raise


def _place(trainer: Trainer) -> tuple[tuple[int, ...], str]:
    """Return how far a run is, in counts that are alike on every rank, and in words. Another thread calls it."""
    run, state = trainer.run, trainer.state
    text = trainer.stage or ""
    if run is not None:
        text = f"{text}, epoch {state.epoch}, batch {state.batch}"
    hook = trainer.logbook.collector.hook if trainer.logbook.collector is not None else ""
    where = "evaluation" if trainer.is_evaluating and run is not None else ""
    counts = (0 if run is None else run.batches_begun, trainer.logbook.reductions)
    return counts, ", ".join(part for part in (text, where, hook) if part)


def refuse_nested(trainer: Trainer, call: str) -> None:
    """Refuse a call from within a run of the same Trainer, before it changes anything of that (RuntimeError)."""
    if trainer.stage is not None:
        raise RuntimeError(
            f"trainer.{call} was called while trainer.{trainer.stage} runs; call it after that, or from another Trainer."
        )


class Outcome:
    """How a run ended, for what is done after it: nothing of that may hide the error that ended it, or keep the rest undone."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """What ended the run; None while nothing has failed."""

    def after(self, call: Callable[..., Any], *args: Any) -> None:
        """Make a call at the run's end; what it raises comes out if it is the first error, and is printed if it is not."""
        try:
            call(*args)
        except Exception as error:
            if self.error is None:
                self.error = error
                raise
            name = getattr(getattr(call, "func", call), "__qualname__", repr(call))
            print(f"trainwright: {name} failed too: {type(error).__name__}: {error}", file=sys.stderr)


def callbacks_for(trainer: Trainer, module: Module, stage: str) -> list[Callback]:
    """Return the callbacks of a run: the trainer's own, and this module's in place of an earlier module's."""
    if stage != "fit" and trainer.module is module:
        return trainer.callbacks  # those that its fit has left, with what they know of it
    mine, replaced = trainer.callbacks_of_module
    own = [each for each in trainer.callbacks if each not in mine] + replaced
    merged = with_the_modules(own, module.configure_callbacks())
    trainer.callbacks_of_module = (
        [each for each in merged if each not in own],
        [each for each in own if each not in merged],
    )
    return merged


def _agree_on_hooks(trainer: Trainer) -> None:
    """Let every rank reduce where one of them has a hook that looks at the values. Collective."""
    engine = trainer.engine
    names = engine.ranks.exchange(sorted(trainer.hooks.reduced_early), f"the start of {trainer.stage}")
    trainer.hooks.reduced_early = frozenset(chain(*names))


def _start_loggers(trainer: Trainer, choice: Choice, locks: FolderLocks) -> None:
    """Let the loggers choose their folders, and hold those of the checkpoints before anything is written. Collective."""
    engine, path = trainer.engine, choice.path or ""
    trainer.default_root_dir = engine.ranks.broadcast(trainer.default_root_dir, "the start of the loggers")
    saving = trainer.checkpoint_callbacks if trainer.stage == "fit" and not trainer.fast_dev_run else []
    locks.take(each.given_dirpath for each in saving)
    if choice.continues:
        call = "the start of the loggers"
        matches = engine.ranks.decide(lambda: match_states(trainer.loggers, choice.loggers, path), call)
        resume_loggers(trainer.loggers, choice.loggers, path, matches)
    start_loggers(
        trainer.loggers,
        partial(engine.ranks.broadcast, call="the start of the loggers"),
        is_writer=trainer.is_global_zero,
    )
    locks.take(each.folder_in(trainer) for each in saving)
    choice.refuse_overtaken(engine.ranks)


def _set_up(trainer: Trainer, module: Module, stage: str, datamodule: DataModule | None) -> None:
    """Prepare the data on one process of each node, then set up every part in the order of hooks.py. Collective."""
    engine = trainer.engine
    trainer.profiler.setup(stage, engine.local_rank, trainer.log_dir)
    for owner, base in ((datamodule, DataModule), (module, Module)):
        if owner is not None and is_overridden("prepare_data", owner, base):
            if engine.local_rank == 0 if owner.prepare_data_per_node else engine.rank == 0:
                owner.prepare_data()
            # The others wait for it.
            engine.ranks.wait("prepare_data")
    if datamodule is not None:
        datamodule.setup(stage)
    trainer.hooks.call("setup", stage)
    with engine.precision.init_context():
        module.configure_model()
    trainer.profiler.attach(module)
    if stage == "fit":
        _log_hyper_parameters(trainer, module, datamodule)
        _log_graph(trainer, module)


def _leave(trainer: Trainer, outcome: Outcome, evaluation: Evaluation | None) -> None:
    if trainer.compiled is not None:
        trainer.compiled.undo()
        trainer.compiled = None
    stage, trainer.stage = trainer.stage or "", None
    trainer.logbook.stop_collecting()
    trainer.state.progress.enter(Phase.OUTSIDE)
    if trainer.run is not None:
        outcome.after(trainer.run.data.close)
    trainer.run = None
    for callback in trainer.callbacks:
        callback.__dict__.pop("_running_module", None)
    if trainer.datamodule is not None:
        trainer.datamodule.trainer = None
    for child in trainer.module.modules() if trainer.module is not None else ():
        if isinstance(child, Module):
            child.untoggle_optimizer()
    if evaluation is not None:
        outcome.after(evaluation.close)
    outcome.after(trainer.engine.strategy.after_run)
    outcome.after(trainer.profiler.describe)
    outcome.after(trainer.profiler.teardown, stage)


def _log_hyper_parameters(trainer: Trainer, module: Module, datamodule: DataModule | None) -> None:
    """Write the hyper-parameters to the loggers, on rank 0."""
    if not trainer.settings.enable_autolog_hparams or not trainer.loggers:
        return
    plain, _ = logged_hyper_parameters([module, datamodule], is_plain)
    if plain and trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_hyperparams(plain)


def _log_graph(trainer: Trainer, module: Module) -> None:
    """Let the loggers that want it draw the module, on rank 0."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        logger.log_graph(module)


def _close_logger(trainer: Trainer, logger: Logger, outcome: Outcome) -> None:
    """Let a logger write what it holds back."""
    is_interrupted = trainer.interrupted or trainer.stop.number
    status = "interrupted" if is_interrupted else "failed" if outcome.error is not None else "success"
    outcome.after(logger.finalize, status)
    outcome.after(logger.close)


def _withdraw_loggers(trainer: Trainer, outcome: Outcome) -> None:
    """Let a run that was refused leave nothing behind."""
    if outcome.error is not None and not trainer.logbook.has_begun and trainer.world_size == 1:
        outcome.after(withdraw_loggers, trainer.loggers)


def choose_checkpoint(trainer: Trainer, ckpt_path: str | os.PathLike[str] | None, verify: Verify, call: str) -> Choice:
    """Return the verified checkpoint that ckpt_path means. Collective: call on every rank."""
    search = CheckpointSearch(
        trainer.engine,
        trainer.checkpoint_callbacks,
        trainer.loggers,
        trainer.default_root_dir,
        call,
        verify,
        is_trial=call == "fit" and bool(trainer.fast_dev_run),
        say=trainer.print,
    )
    return search.choose(ckpt_path)


class Request(NamedTuple):
    """What an evaluation was asked for, looked at and completed."""

    call: str
    stage: str
    module: Module
    loaders: Any
    datamodule: DataModule | None
    choice: Choice
    verify: Verify


def read_request(
    trainer: Trainer,
    call: str,
    stage: str,
    model: Any,
    loaders: Any,
    ckpt_path: Any,
    datamodule: Any,
    verify: Verify,
) -> Request:
    """Return what is to be evaluated; refuse what cannot be, before anything is run. Collective: call on every rank."""
    refuse_nested(trainer, call)
    callback = trainer.checkpoint_callback
    if model is None and ckpt_path is None and callback is not None and callback.best_model_path:
        ckpt_path = "best"
        trainer.print(f"trainer.{call} was given no module: it takes the best checkpoint, {callback.best_model_path}")
    module: Any = model if model is not None else trainer.module
    check_module(module, [] if stage == "predict" else [f"{stage}_step"], call)
    loaders, given_datamodule = read_datamodule(loaders, datamodule, "dataloaders", call)
    if given_datamodule is None and loaders is None and model is None:
        given_datamodule = trainer.datamodule  # the one of the run before, as the module
    source = find_source(stage, loaders, given_datamodule, module, "dataloaders", call)
    if not source.is_defined:
        source.load()  # which says what is missing
    trainer.callbacks = callbacks_for(trainer, module, call)
    choice = choose_checkpoint(trainer, ckpt_path, verify, call)
    return Request(call, stage, module, loaders, given_datamodule, choice, verify)


@contextmanager
def evaluating(trainer: Trainer, request: Request) -> Iterator[Evaluation]:
    """Surround one evaluation with what it needs, and give it ready to run. Collective: call on every rank."""
    call, stage, module, loaders, datamodule, choice, _ = request
    source = find_source(stage, loaders, datamodule, module, "dataloaders", call)
    engine, is_the_same = trainer.engine, choice.path is None and trainer.module is module
    trained = list(engine.optimizers) if is_the_same else []
    stays = bool(trained) and not engine.strategy.keeps_optimizers  # they would go with what else the strategy holds
    seen: Stage = getattr(trainer.stages, stage)
    evaluation = Evaluation(trainer, module, stage, source, find_transfer(engine, module, datamodule), seen)
    with running(trainer, module, call, datamodule, choice, evaluation, stays):
        opened = open_with_hooks(trainer, choice.checkpoint) if choice.checkpoint is not None else None
        prepare_module(trainer, module)
        if not stays:
            engine.prepare_module(module, None)
        if opened is not None:
            restore_weights(trainer, opened)
        engine.take_seed()
        yield evaluation
    # What was trained with can still be saved, unless the weights are other ones now.
    engine.optimizers = trained
    if not trained:
        trainer.optimizers, trainer.prepared_optimizers, trainer.lr_scheduler_configs = [], [], []
