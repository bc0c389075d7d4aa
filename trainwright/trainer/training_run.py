"""The training run: what the training loop reads at every batch, and what it keeps from one batch to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.data.datamodule import DataModule
from trainwright.distributed.failures import is_secondary_failure
from trainwright.distributed.sync_points import SyncPoint
from trainwright.engine.optimizers import SchedulerConfig, check_scheduler, use_fused
from trainwright.engine.prepared import PreparedOptimizer
from trainwright.engine.window import AccumulationWindow
from trainwright.module import Module
from trainwright.profilers.base import is_measuring
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.base import Clipping, StepResult
from trainwright.strategies.divided_optimizers import unwrap_optimizer
from trainwright.trainer.checkpoint_choice import Choice
from trainwright.trainer.epoch_batches import Batch, EpochBatches, Pairs
from trainwright.trainer.evaluate import Evaluation
from trainwright.trainer.oversights import LONG_EPOCH, warn_of_evaluation_mode, watching
from trainwright.trainer.run import Parts, Run
from trainwright.trainer.run_position import Phase
from trainwright.trainer.sources import BatchTransfer, LoaderSource, StepArguments, find_transfer, read_step
from trainwright.trainer.training_data import TrainData
from trainwright.trainer.uneven_round import UnevenRound

STEP_OVERRIDES = ("optimizer_step", "configure_gradient_clipping")
TOO_MANY_EMPTY = 10
"""Batches without a loss at a run's beginning after which a warning says that nothing is trained."""


class IntervalClock:
    """Rank 0 looks at the time; all ranks act at the step that their sync point agrees on."""

    def __init__(self, seconds: float, sync_point: SyncPoint) -> None:
        self._seconds, self._sync_point = seconds, sync_point
        self._next = time.monotonic() + seconds

    def is_due(self, step: int) -> bool:
        """Return whether an interval ends at this optimizer step; call it at each, on every rank."""
        if self._sync_point.rank == 0 and time.monotonic() >= self._next:
            self._sync_point.request()
            self._next = float("inf")  # until this request is met
        if not self._sync_point.is_reached(step):
            return False
        self._next = time.monotonic() + self._seconds
        return True


Hooks = tuple[Callable[..., Any], ...]


@dataclass(frozen=True)
class LoopPlan:
    """The branches that the loop of one fit has, chosen once when the fit is prepared."""

    is_manual: bool
    arguments: StepArguments
    """The arguments of training_step."""
    transfer: BatchTransfer | None
    """Moves a batch to the device. None if batches need no change."""
    overrides: Mapping[str, Callable[..., Any]]
    """The parts of a step that the module overrides (optimizer_step and so on), by name."""
    cleared_first: Optimizer | None
    """The optimizer whose gradients are cleared before training_step, which then has their memory. None if hooks take part."""
    gives_closure: bool
    """Whether the optimizer's step gets a closure."""
    clipping: Clipping | None
    log_every: int
    """Optimizer steps between two rows of step values; 0 for none."""

    has_own_step: bool
    """Whether the module takes part in the optimizer's step, or the step gets a closure."""
    batch_start: Hooks
    batch_end: Hooks
    before_backward: Hooks
    after_backward: Hooks
    before_step: Hooks


class TrainingRun(Run):
    """A call of fit, with the source of its training loaders and the validation loaders that it was given."""

    module: Module
    data: TrainData
    plan: LoopPlan
    window: AccumulationWindow
    optimizer: Optimizer | None = None
    """The optimizer to step. None under manual optimization, or without optimizers."""
    accumulate = 1
    """Batches of a window in this epoch."""
    has_plateau_steps = False
    """Whether a step-wise scheduler follows a metric."""

    def __init__(
        self,
        parts: Parts,
        module: Module,
        datamodule: DataModule | None,
        choice: Choice,
        previous: Run,
        source: LoaderSource,
        given_validation: Any,
    ) -> None:
        super().__init__(parts, "fit", module, datamodule, choice, previous)
        self.source, self.given_validation = source, given_validation
        self.validation: Evaluation | None = None
        self.window = AccumulationWindow(self.engine)
        """The batches of the next optimizer step. Windows count from where the run resumes, since no checkpoint is saved
        within one."""
        self.batch: Batch | None = None
        """The current batch."""
        self.uneven_round: UnevenRound | None = None
        """The current batch, if it is one of an uneven round."""
        self.num_empty = 0
        """Batches of this run for which training_step returned None."""
        self.step_results: list[StepResult] = []
        """Results of the steps that the module's running optimizer_step has made."""
        self._is_watched = False
        """Whether an epoch has begun, during which the loop looks for oversights."""
        self.close_at_end(self._drop_batch)

    def prepare(self, accumulate: int, validation: LoaderSource | None) -> None:
        """Make the training data and the validation, once the strategy has chosen the batches of a step."""
        settings, seconds = self.settings, self.settings.validation_seconds
        self.validation_clock = (
            None if seconds is None else IntervalClock(seconds, self.engine.connection.sync_point("validation"))
        )
        self.accumulate = accumulate
        if accumulate != settings.accumulate_grad_batches:  # otherwise setup() may have set another number
            self.update_trained(accumulate_grad_batches=accumulate)
        if validation is not None:
            self.validation = Evaluation(self, self.module, "validation", validation)
        data = self._train_data()
        if self.validation is not None:
            data.plan_validation()
        self.is_prepared = True

    def plan_loop(
        self, arguments: StepArguments, clipping: Clipping | None, overrides: Mapping[str, Any], *, gives_closure: bool
    ) -> None:
        """Choose the branches of the loop, once the optimizers are made."""
        has_hooks = bool(self.hooks["on_before_zero_grad"]) or "optimizer_zero_grad" in overrides
        self.plan = LoopPlan(
            is_manual=not self.module.automatic_optimization,
            arguments=arguments,
            transfer=find_transfer(self.engine, self.module, self.datamodule, self.profiler),
            overrides=overrides,
            cleared_first=None if has_hooks else self.optimizer,
            gives_closure=gives_closure,
            clipping=clipping,
            log_every=self.settings.log_every,
            has_own_step=gives_closure or not overrides.keys().isdisjoint(STEP_OVERRIDES),
            batch_start=self.hooks["on_train_batch_start"],
            batch_end=self.hooks["on_train_batch_end"],
            before_backward=self.hooks["on_before_backward"],
            after_backward=self.hooks["on_after_backward"],
            before_step=self.hooks["on_before_optimizer_step"],
        )

    def _train_data(self) -> TrainData:
        """Return the training data, not loaded if this makes it."""
        if self.trained.data is None:
            self.data = TrainData(
                self.source,
                self.engine,
                self.settings,
                self.state,
                {**self.loader_options, "in_order": self.in_order},
                pulls=read_step(self.module, "training_step").pulls,
                note=self.stages.note_training,
            )
            self.update_trained(data=self.data)
            self.close_at_end(self.data.close)
        return self.data

    def load_training_data(self) -> None:
        self._train_data().load()

    def take_schedulers(self, schedulers: list[SchedulerConfig]) -> None:
        """Take the schedulers of configure_optimizers, once the engine has the optimizers."""
        self.update_trained(schedulers=schedulers)
        self.engine.script.note_schedulers([config.scheduler for config in schedulers])
        self.has_plateau_steps = any(config.interval == "step" and config.is_plateau for config in schedulers)

    def take_optimizers(self, optimizers: list[Optimizer], prepared: list[PreparedOptimizer]) -> None:
        """Take the optimizers as the strategy has made them."""
        self.update_trained(optimizers=optimizers, prepared_optimizers=prepared)
        if optimizers and self.module.automatic_optimization:
            self.optimizer = optimizers[0]

    def replace_schedulers(self) -> None:
        """Replace the schedulers by a callback's scheduler, if a callback has one."""
        if self.optimizer is None:
            return
        returned = self.hooks.call("configure_lr_scheduler", unwrap_optimizer(self.optimizer))
        scheduler = next((each for each in returned if each is not None), None)
        # It is returned at each epoch's start, and replaces the others once.
        if scheduler is not None and all(config.scheduler is not scheduler for config in self.trained.schedulers):
            config = SchedulerConfig(scheduler)
            check_scheduler(config, [unwrap_optimizer(self.optimizer)])
            self.take_schedulers([config])

    def begin_windows(self) -> None:
        """Begin an epoch's windows, after the hooks of its start, which may freeze layers or change the windows' length."""
        self.accumulate = self.trained.accumulate_grad_batches
        if not self.plan.is_manual:  # otherwise gradients that on_train_epoch_start has sent backward wait for a step
            self.window.drop()
        self.engine.refresh_trainable()
        self.engine.sync_gradients(True)
        if self.settings.fused_optimizers:
            for optimizer in self.trained.optimizers:
                use_fused(optimizer, [self.module])  # a hook may have added groups

    def epoch_batches(self) -> EpochBatches:
        """Return the batches of the epoch, from the state's position on."""
        self.data.plan_states(self.accumulate, self.checkpoint_callbacks)
        plan = self.plan
        return EpochBatches(
            self.data, plan.arguments, plan.transfer, self.engine, self.logbook, self._watched, self._is_stopped
        )

    def _watched(self, pairs: Pairs) -> Pairs:
        """Return the same batches, timed by the profiler; in the run's first epoch the loop looks for oversights."""
        if is_measuring(self.profiler):
            pairs = self.profiler.timed_iterator(pairs, "train_dataloader_next")
        if self._is_watched:
            return pairs
        self._is_watched = True
        warn_of_evaluation_mode(self.module)
        length = self.data.num_batches
        if length is not None and length <= LONG_EPOCH:
            return pairs
        processes = self.engine.environment.local_world_size
        return watching(pairs, self.stages.train_dataloader, self.engine.device, processes)

    def _is_stopped(self) -> bool:
        """Return whether the run stops before the first batch. Collective."""
        self.stop.agree()
        return self.stop.is_due()

    def begin_batch(self, batch: Batch) -> bool:
        """Begin a training batch; return False if on_train_batch_start ends the epoch before it. Collective then."""
        collector = self.logbook.training_collector
        assert collector is not None
        self.batch = batch
        self.state.progress.begin_batch(self.state, batch.is_last)
        collector.begin_batch(batch.value)
        if batch.is_uneven:
            self.uneven_round = UnevenRound(collector, self.module, batch.is_dummy)
        if not self.plan.batch_start or not batch.arguments:
            return True
        if -1 not in self.hooks.call("on_train_batch_start", batch.value, batch.index):
            return True
        self._cancel_batch()
        batch.is_last = True
        return False

    def end_uneven_round(self) -> None:
        """End the batch of an uneven round, after its hooks."""
        if self.uneven_round is not None:
            self.uneven_round.end()
            self.uneven_round = None

    def _cancel_batch(self) -> None:
        """Drop a batch before its step, with the gradients of its window. Collective (RuntimeError if a rank trains on).

        Saves that have waited for the window's end wait for the epoch's: this batch was read and not trained on.
        """
        self.state.progress.cancel_batch()
        self.engine.ranks.wait("the end of an epoch by -1 from on_train_batch_start")
        self.end_uneven_round()
        if self.optimizer is not None and self.window.is_open:
            self.optimizer.zero_grad()
            self.window.drop()
            self.engine.sync_gradients(True)

    def end_batches(self) -> None:
        """End the epoch's batches."""
        collector = self.logbook.training_collector
        assert collector is not None
        collector.begin_loader(None)
        self.state.progress.end_batches()
        self._drop_batch()

    def _drop_batch(self) -> None:
        """Free the objects that hold a batch: the Trainer keeps this run until its next one."""
        self.batch = self.uneven_round = None

    def count_empty(self) -> None:
        """Count a batch for which training_step returned None, and warn if the run has begun with nothing else."""
        self.num_empty += 1
        if self.num_empty == TOO_MANY_EMPTY == self.state.total_batches + 1:
            rank_zero_warn(
                f"training_step returned None for the first {self.num_empty} batches, which skips them: nothing has been "
                "trained. Did you forget the return statement?",
                stacklevel=4,
            )

    def refuse_empty_epoch(self) -> None:
        """Reject, at the end of a run's first epoch, a training_step that has always returned None (RuntimeError)."""
        if self.num_empty and self.num_empty == self.state.total_batches and self.optimizer is not None:
            raise RuntimeError(
                f"training_step returned None for all {self.num_empty} batches of the first epoch, so nothing was trained; "
                "return the loss (did you forget the return statement?), or set automatic_optimization = False and step "
                "yourself."
            )

    def announce_step(self, optimizer: Optimizer) -> None:
        """Call the hooks before a step of manual optimization."""
        if self.hooks["on_before_optimizer_step"]:
            with self.engine.precision.step_context():  # where a step of automatic optimization calls them too
                self.engine.strategy.finalize(optimizer)
                self.hooks.call("on_before_optimizer_step", optimizer)

    def count_step(self, result: StepResult) -> None:
        """Count a step of manual optimization; one within the module's optimizer_step once that has returned."""
        if self.module.automatic_optimization:
            self.step_results.append(result)
            return
        needs_engine = self.engine.world_size > 1 or self.engine.precision.has_scaler
        if needs_engine and not (self.state.step or self.window.has_gradients):
            raise RuntimeError(
                "an optimizer was stepped before any self.manual_backward(loss). The gradients of a plain loss.backward() are "
                "neither averaged over the ranks nor scaled as 16-mixed needs it. Call self.manual_backward(loss) instead."
            )
        self.state.count_manual_step(result.skipped)
        self.window.drop()

    def backward(self, loss: Tensor, send: Any, options: dict[str, Any]) -> None:
        """Send a loss backward under manual optimization, weighted as its round is, and call the hooks."""
        if self.running_call is not None:
            self.window.hold_gradients()  # until an optimizer steps
            if self.batch is not None:
                loss = self.window.scale(loss, self.batch.weight)
        super().backward(loss, send, options)

    @property
    def enable_validation(self) -> bool:
        """Return whether this fit validates."""
        return self.running_call is not None and self.validation is not None

    @property
    def validates_within(self) -> bool:
        """Return whether a validation may be due within an epoch."""
        by_time = self.validation_clock is not None
        return self.validation is not None and (self.data.validate_every is not None or by_time)

    @property
    def is_done(self) -> bool:
        """Return whether no epoch is left to train, nor one that a stopped run was resumed within."""
        last, is_stopped = self.settings.last_epoch, self.stop.is_due()
        return (is_stopped and not self.state.is_unfinished) or (last is not None and self.state.epoch >= last)

    def obstacle(self, error: BaseException) -> str:
        """Return why a run that fails here cannot be resumed exactly; "" if it can."""
        state, phase, strategy = self.state, self.state.progress.phase, self.engine.strategy
        if self.engine.world_size > 1:
            if is_secondary_failure(error):
                return "another rank failed first"
            is_whole = strategy.capabilities.holds_modules and not strategy.capabilities.divides_optimizers
            if not is_whole or phase not in (Phase.BATCH, Phase.BETWEEN_BATCHES):
                return f"it would take all {self.engine.world_size} ranks"
        if self.window.is_open:
            return "the run failed within an accumulation window"
        if phase is Phase.BATCH:
            return "the run failed in a batch, during or after its optimizer step" if self._has_stepped(error) else ""
        is_at_end = phase in (Phase.EPOCH_END, Phase.VALIDATION_AT_END) or self.stages.train_dataloader is None
        if is_at_end or state.epoch_ended or state.batch >= self.stages.num_training_batches:
            return "the run failed at the end of an epoch"
        # The validation is counted by then, so a resumed run would leave it out.
        if state.progress.is_evaluating and state.validated_at == state.total_batches:
            return "the run failed at the end of a validation"
        return ""

    def _has_stepped(self, error: BaseException) -> bool:
        """Return whether an optimizer may have changed weights in the batch that failed with this error."""
        state, progress = self.state, self.state.progress
        # Steps of torch's own optimizers are not counted under manual optimization.
        is_uncounted = not self.module.automatic_optimization and state.total_batches > 0 and not state.step
        frames = (frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "step")
        is_within = any(frame.f_globals.get("__name__", "").startswith("trainwright.") for frame in frames)
        before = (progress.batches_before, progress.steps_before)
        return is_uncounted or is_within or (state.total_batches, state.step) != before
