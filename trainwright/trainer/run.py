"""Run: one call of a Trainer, from the setup of its parts to their teardown. The next call makes another run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.callbacks.base import attach, detach
from trainwright.checkpoint.foreign_formats import is_plain
from trainwright.data.datamodule import DataModule
from trainwright.devices.abilities import has_pinned_memory
from trainwright.devices.hardware import is_out_of_memory
from trainwright.distributed.failures import is_secondary_failure
from trainwright.engine.compilation import Compiled
from trainwright.engine.engine import Engine
from trainwright.engine.optimizers import SchedulerConfig
from trainwright.engine.prepared import PreparedOptimizer
from trainwright.engine.window import AccumulationWindow
from trainwright.faults.failing_loggers import outlived
from trainwright.faults.nan_policy import NanGuard
from trainwright.hyperparameters import logged_hyper_parameters
from trainwright.loggers import Logger, match_states, refuse_branch, resume_loggers, start_loggers, withdraw_loggers
from trainwright.loggers.base import RunResult
from trainwright.memory.activation_checkpointing import ActivationCheckpointing
from trainwright.memory.memory_note import memory_note
from trainwright.module import Module, hook_of, is_overridden, trainer_of
from trainwright.profilers import Profiler
from trainwright.profilers.base import instrument, is_measuring
from trainwright.rank_zero import say
from trainwright.strategies.base import Clipping
from trainwright.trainer.checkpoint_choice import Choice, lock_folders
from trainwright.trainer.hooks import HookTable, check_hooks
from trainwright.trainer.logbook import Logbook
from trainwright.trainer.run_position import Position
from trainwright.trainer.settings import Settings
from trainwright.trainer.sources import Stages, parts_of
from trainwright.trainer.stop import Stop
from trainwright.trainer.training_data import TrainData
from trainwright.trainer.vendor import gather_by_data

START_OF_LOGGERS = "the start of the loggers"


class Parts(NamedTuple):
    """The parts that a Trainer passes to its runs."""

    trainer: Any
    """Passed to hooks and callbacks. The run only uses what callbacks may use."""
    settings: Settings
    engine: Engine
    loggers: list[Logger]
    profiler: Profiler
    in_order: bool
    """Whether training keeps the order of the data, as overfit_batches asks."""
    root: str
    """Where logs and checkpoints go unless a logger or a callback has its folder."""


@dataclass(frozen=True)
class Trained:
    """Objects that a fit has made for a module. A save after the fit, and after evaluations of the same module, reads them."""

    accumulate_grad_batches: int
    """Batches of one optimizer step. A callback may change it at an epoch's start."""
    resume_source: str | None = None
    """The checkpoint that the fit was resumed from."""
    data: TrainData | None = None
    optimizers: list[Optimizer] = field(default_factory=list)
    prepared_optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[SchedulerConfig] = field(default_factory=list)


class Outcome:
    """The first error of a run. Cleanup steps neither hide it nor stop one another."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """None until something fails."""

    def after(self, call: Callable[..., Any], *args: Any) -> None:
        """Make a call of the cleanup. Raise its error if it is the run's first, otherwise print it."""
        try:
            call(*args)
        except Exception as error:
            if self.error is None:
                self.error = error
                raise
            name = getattr(getattr(call, "func", call), "__qualname__", repr(call))
            say(f"trainwright: {name} failed too: {type(error).__name__}: {error}")


class Run:
    """One call of a Trainer: validate, test or predict. A call of fit is a TrainingRun.

    An evaluation keeps the counters, the stop and the optimizers of the `previous` run. `state` has the counters of a first
    run that continues the work of another process.
    """

    def __init__(
        self,
        parts: Parts,
        call: str,
        module: Module | None,
        datamodule: DataModule | None,
        choice: Choice,
        previous: Run | None,
        state: Position | None = None,
    ) -> None:
        self.trainer, self.settings, self.engine = parts[:3]
        self.loggers, self.profiler, self.in_order, self.root = parts[3:]
        self.call, self.module, self.datamodule, self.choice = call, module, datamodule, choice
        self.running_call: str | None = None
        """The call while it runs, else None."""
        self.stages: Stages = Stages() if previous is None else previous.stages
        if previous is None or call == "fit":
            self.state = state or Position()
            rerunnable = choice.is_rerunnable
            self.stop = Stop(self.engine, self.settings, self.state, self.trainer, is_rerunnable=rerunnable)
            source = None if choice.checkpoint is None else choice.path
            self.trained = Trained(self.settings.accumulate_grad_batches, source)
        else:
            self.state, self.stop, self.trained = previous.state, previous.stop, previous.trained
        self.waiting: list[tuple[bool, Callable[[], None]]] = []
        """The saves that wait, in order: whether the checkpoint has weights only, and the function that writes it."""
        self.logbook = Logbook(self.loggers, self.engine, self.state)
        profiler = self.profiler if is_measuring(self.profiler) else None
        if module is not None:  # None until the first call
            check_hooks(module)
            for callback in self.trainer.callbacks:
                check_hooks(callback)
        self.hooks = HookTable(self.trainer, module, self.logbook, profiler)
        self._undo: list[Callable[[], None]] = []
        """Restore the module's own calls, which compile= and activation_checkpointing= replace."""
        self.window: AccumulationWindow | None = None
        """The batches of the next optimizer step, in a fit."""
        self.is_prepared = False
        """Whether the loop may run, or has begun."""
        self.enable_validation = False
        """Whether the run is a fit that validates."""
        self.numbers: NanGuard | None = None
        """Applies the nan_policy of a fit."""
        self._closing: list[Callable[[], None]] = []

    def obstacle(self, error: BaseException) -> str:
        """Return why a run that fails here cannot be resumed exactly, "" if it can."""
        return ""

    @property
    def loader_options(self) -> dict[str, Any]:
        """Return how loaders are sharded."""
        pins = has_pinned_memory(self.engine.device.type)
        return {"shard": self.settings.use_distributed_sampler, "pin_memory": pins}

    def update_trained(self, **changes: Any) -> None:
        """Replace some of the objects that the fit has made."""
        self.trained = replace(self.trained, **changes)

    def backward(self, loss: Tensor, send: Any, options: dict[str, Any]) -> None:
        """Send a loss backward under manual optimization, by `send` if the module overrides it, and call the hooks."""
        self.hooks.call("on_before_backward", loss)
        self.engine.backward(loss, send, **options)
        self.hooks.call("on_after_backward")

    def clip_gradients(self, optimizer: Optimizer, limit: float | None, algorithm: str | None) -> None:
        """Clip the gradients of one optimizer in place: by "norm" (None too) or "value"; a limit of None does nothing."""
        if algorithm not in (None, "norm", "value"):
            raise ValueError(f"gradient_clip_algorithm={algorithm!r} is unknown; choose from norm, value.")
        if limit:
            prepared = self.trained.prepared_optimizers
            # Users pass an element of self.optimizers(), and the strategy knows the optimizer in it.
            inner = next((each.optimizer for each in prepared if optimizer in (each, each.optimizer)), optimizer)
            clipping = Clipping(value=limit) if algorithm == "value" else Clipping(norm=limit)
            self.engine.strategy.clip_gradients(inner, clipping)

    def save(self, weights_only: bool, write: Callable[[], None]) -> bool:
        """Call `write`, or queue it if no checkpoint may be written now; return whether it was called. Collective."""
        if not self.state.may_save(weights_only):
            self.waiting.append((weights_only, write))
            return False
        with self.state.timeline.during("checkpoints"):
            write()
        return True

    def save_waiting(self) -> None:
        """Write the checkpoints of the queue that may be written now. Collective."""
        if not self.state.progress.is_within_window:
            waiting, self.waiting = self.waiting, []
            for request in waiting:
                self.save(*request)

    def close_at_end(self, close: Callable[[], None]) -> None:
        """Have something called when the run ends, such as the end of loaders' workers."""
        self._closing.append(close)

    def prepare_module(self, module: Module) -> None:
        """Convert batch norm, recompute activations and compile, as the settings ask, before the module moves."""
        if self.settings.sync_batchnorm and self.engine.world_size > 1:
            # The ranks of a tensor group see the same samples.
            nn.SyncBatchNorm.convert_sync_batchnorm(module, self.engine.strategy.data_group)  # type: ignore[no-untyped-call]
        if self.engine.strategy.data_group is not None:
            self._undo.append(gather_by_data(module))
        checkpointing = ActivationCheckpointing.read(self.settings.activation_checkpointing)
        if checkpointing is not None and self.call == "fit":
            self._undo.append(checkpointing.install(module, self.engine.device.type, self.engine.strategy))
        if self.settings.compile:
            options = self.settings.compile if isinstance(self.settings.compile, dict) else {}
            self._undo.append(Compiled(module, options).undo)

    def changes(self) -> dict[str, Any]:
        """Return the results of this run, as plain data for a Trainer in another process."""
        return {
            "state": self.state.plain(),
            "metrics": self.logbook.state_dict(),
            "should_stop": self.stop.requested,
            "accumulate_grad_batches": self.trained.accumulate_grad_batches,
            "ckpt_path": self.choice.path,
            "resume_source": self.trained.resume_source,
        }

    def load_changes(self, changed: dict[str, Any]) -> None:
        """Load the results that `changes` returned in another process."""
        self.state, self.choice = Position.of_plain(changed["state"]), Choice(changed["ckpt_path"])
        self.stop = Stop(self.engine, self.settings, self.state, self.trainer)
        self.stop.request(changed["should_stop"])
        self.trained = Trained(changed["accumulate_grad_batches"], changed["resume_source"])
        self.logbook = Logbook(self.loggers, self.engine, self.state)
        self.logbook.load_state_dict(changed["metrics"])
        self.hooks = HookTable(self.trainer, self.module, self.logbook)

    @contextmanager
    def opened(self, stays: bool = False) -> Iterator[None]:
        """Set up the surroundings of the loop, and take them down whatever happens. Collective: call on every rank.

        With `stays` the module remains prepared as by the latest run. Otherwise the engine closes it first.
        """
        engine, outcome = self.engine, Outcome()
        module, datamodule = self.module, self.datamodule
        assert module is not None
        self.stop.note_end(None)
        self.state.progress.begin(self.call, self.window)
        outer = trainer_of(module)
        # Registered functions are called from the last to the first: teardowns, loggers, locks, then the rest, and the report.
        with ExitStack() as stack:
            # A hook of that Trainer's run may have made this call.
            if outer is not None and outer.run.running_call is not None:
                stack.callback(setattr, module, "trainer", outer)
            self.running_call = self.call
            stack.callback(self._report, outcome)
            stack.callback(self._leave, outcome)
            module.trainer = self.trainer
            if datamodule is not None:
                datamodule.trainer = self.trainer
            self.hooks.agree(engine.ranks, f"the start of {self.call}")
            attach(self.trainer.callbacks, module)
            if not stays:
                engine.close()
            stack.enter_context(engine.hangs.watching(self._position, lambda: (self.trainer.log_dir, self.state.step)))
            if is_measuring(self.profiler):
                stack.callback(instrument(engine, self.profiler))
            stack.callback(self._withdraw_loggers, outcome)
            locks = stack.enter_context(ExitStack())
            for logger in reversed(self.loggers) if engine.rank == 0 else ():
                stack.callback(self._close_logger, logger, outcome)
            # Reversed, so that they are called in the order of the hooks.
            for hook in reversed(self.hooks["teardown"]):
                stack.callback(outcome.after, hook, self.call)
            if datamodule is not None:
                stack.callback(outcome.after, hook_of(datamodule, "teardown", DataModule), self.call)
            try:
                self._start_loggers(locks)
                self._set_up()
                yield
                # Within the try, so that an error of the save in flight is the run's, and on_exception sees it.
                with self.state.timeline.during("checkpoints"):
                    engine.finish_save()
                if self.numbers is not None and not self.settings.is_trial:
                    self.numbers.end()
            except BaseException as error:
                outcome.error = error
                self._fail(error, outcome)
                raise

    def _fail(self, error: BaseException, outcome: Outcome) -> None:
        """Record the error that ends the run, and call on_exception."""
        engine = self.engine
        if self.logbook.collector is not None:
            self.logbook.collector.annotate(error)
        if self.call == "fit" and is_out_of_memory(error):
            outcome.after(self._explain_memory, error)
        if self.is_prepared:
            self.state.progress.fail(self.obstacle(error))
        self.stop.note_end(error)
        # A save in flight can commit while every rank lives, whatever they raise, but not if a rank is gone.
        outcome.after(engine.writer.drop if is_secondary_failure(error) else engine.finish_save)
        for hook in self.hooks["on_exception"]:
            outcome.after(hook, error)
        if self.datamodule is not None:
            outcome.after(hook_of(self.datamodule, "on_exception", DataModule), error)

    def _explain_memory(self, error: BaseException) -> None:
        """Add the use of memory, and the arguments that need less, to an out-of-memory error."""
        assert self.module is not None
        if self.state.progress.is_evaluating:
            error.add_note("It happened in a validation: pass a smaller batch_size to the validation loader.")
            return
        loader = parts_of(self.stages.train_dataloader)[0]
        size = (
            getattr(loader, "batch_size", None)
            or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
            or 1
        )
        recomputes, accumulate = bool(self.settings.activation_checkpointing), self.trained.accumulate_grad_batches
        error.add_note(memory_note(self.engine, self.module, error, size, accumulate, recomputes))

    def _position(self) -> tuple[tuple[int, ...], str]:
        """Return how far the run is, in counts that are the same on every rank, and in words. Another thread calls it."""
        parts, collector = [self.call], self.logbook.collector
        if self.is_prepared:
            parts.append(f"epoch {self.state.epoch}, batch {self.state.batch}")
            if self.state.progress.is_evaluating:
                parts.append("evaluation" if collector is None else f"evaluation, its batch {collector.index}")
        if collector is not None and collector.hook:
            parts.append(collector.hook)
        return (self.state.progress.batches_begun, self.logbook.reductions), ", ".join(parts)

    def _start_loggers(self, locks: ExitStack) -> None:
        """Let the loggers choose their folders, and lock the checkpoint folders before anything is written. Collective."""
        ranks, choice = self.engine.ranks, self.choice
        # Rank 0's, because the working directories of the ranks may differ.
        self.root = ranks.broadcast(self.root, START_OF_LOGGERS)
        saving = self.trainer.checkpoint_callbacks if self.call == "fit" and not self.settings.fast_dev_run else []
        lock_folders(ranks, [callback.given_dirpath for callback in saving], locks)
        path = choice.path or ""
        if choice.continues:
            matches = ranks.decide(lambda: match_states(self.loggers, choice.loggers, path), START_OF_LOGGERS)
            resume_loggers(self.loggers, choice.loggers, path, matches)
        elif choice.loggers:
            ranks.decide(lambda: refuse_branch(self.loggers, choice.loggers, path), START_OF_LOGGERS)
        # Default folders are in the loggers' run folders, which are known from here on.
        for logger in self.loggers if self.call == "fit" else ():
            logger.begin_fit()
        agreed = partial(ranks.broadcast, call=START_OF_LOGGERS)
        start_loggers(self.loggers, agreed, is_writer=self.engine.rank == 0, call=self.call)
        lock_folders(ranks, [callback.folder_in(self.trainer) for callback in saving], locks)

    def _set_up(self) -> None:
        """Prepare the data on one process of each node, then set up every part in the order of hooks.py. Collective."""
        engine, module, datamodule = self.engine, self.module, self.datamodule
        assert module is not None
        log_dir = next((logger.log_dir for logger in self.loggers if logger.log_dir), None)
        self.profiler.setup(self.call, engine.local_rank, log_dir)
        timed = self.profiler.timed
        for owner, base, word in ((datamodule, DataModule, "datamodule"), (module, Module, "module")):
            if owner is not None and is_overridden("prepare_data", owner, base):
                if engine.local_rank == 0 if owner.prepare_data_per_node else engine.rank == 0:
                    timed(owner.prepare_data, f"[{word}] prepare_data")()
                engine.ranks.wait("prepare_data")
        if datamodule is not None and is_overridden("setup", datamodule, DataModule):
            timed(datamodule.setup, "[datamodule] setup")(self.call)
        self.hooks.call("setup", self.call)
        configure_model = hook_of(module, "configure_model", Module)
        if is_overridden("configure_model", module, Module):
            configure_model = timed(configure_model, "[module] configure_model")
        with engine.precision.init_context():
            configure_model()
        self.profiler.attach(module)
        for logger in self.loggers if self.call == "fit" and engine.rank == 0 else ():
            outlived(logger, "log_graph", module)

    def log_hyper_parameters(self) -> None:
        """Write the hyper-parameters to the loggers, on rank 0."""
        if self.settings.enable_autolog_hparams and self.loggers and self.engine.rank == 0:
            plain = logged_hyper_parameters((self.module, self.datamodule), is_plain)
            for logger in self.loggers if plain else ():
                outlived(logger, "log_hyperparams", plain)

    def _leave(self, outcome: Outcome) -> None:
        while self._undo:
            self._undo.pop()()
        self.running_call, self.is_prepared, self.enable_validation = None, False, False
        self.logbook.stop_collecting()
        self.state.progress.end(outcome.error is not None)
        detach(self.trainer.callbacks)
        for child in self.module.modules() if self.module is not None else ():
            if isinstance(child, Module):
                # A run that failed after toggle_optimizer has left parameters frozen.
                child.untoggle_optimizer()
        for close in self._closing:
            outcome.after(close)
        outcome.after(self.engine.strategy.after_run, outcome.error)
        if self.module is not None:
            self.engine.precision.restore_module(self.module)
        outcome.after(self.profiler.describe)
        outcome.after(self.profiler.teardown, self.call)

    def _close_logger(self, logger: Logger, outcome: Outcome) -> None:
        outcome.after(outlived, logger, "finalize", self._result(outcome))
        outcome.after(outlived, logger, "close")

    def _report(self, outcome: Outcome) -> None:
        """Let callbacks report on a fit or an evaluation that has begun, once its loggers and its profiler are closed."""
        if self.call != "predict" and self.logbook.has_begun:
            result, error = self._result(outcome), outcome.error
            for hook in self.hooks["on_run_end"]:
                outcome.after(hook, result, error)

    def _result(self, outcome: Outcome) -> RunResult:
        if self.stop.interrupted or self.stop.number:
            return "interrupted"
        is_finite = self.numbers is None or not self.numbers.fault
        return "success" if outcome.error is None and is_finite else "failed"

    def _withdraw_loggers(self, outcome: Outcome) -> None:
        """Remove the files of a run that was rejected."""
        if outcome.error is not None and not self.logbook.has_begun:
            outcome.after(withdraw_loggers, self.loggers, self.engine.world_size == 1)
