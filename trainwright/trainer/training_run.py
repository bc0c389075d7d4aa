"""The training run: what the training loop reads at every batch, and what it keeps from one batch to the next."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.data.datamodule import DataModule
from trainwright.data.loaders import with_last
from trainwright.data.seeding import set_rng_state
from trainwright.data.transfer import Prefetcher
from trainwright.distributed.failures import is_secondary_failure
from trainwright.engine.optimizers import SchedulerConfig
from trainwright.engine.prepared import PreparedOptimizer
from trainwright.engine.window import AccumulationWindow
from trainwright.module import Module
from trainwright.profilers.base import is_measuring
from trainwright.strategies.base import Clipping, Optimization, StepResult
from trainwright.strategies.divided_optimizers import unwrap_optimizer
from trainwright.trainer.checkpoint_choice import Choice
from trainwright.trainer.clock import IntervalClock
from trainwright.trainer.evaluate import Evaluation
from trainwright.trainer.oversights import LONG_EPOCH, warn_of_evaluation_mode, watching
from trainwright.trainer.phase import ENDING, Phase
from trainwright.trainer.plain_backwards import PlainBackwards
from trainwright.trainer.run import Parts, Run
from trainwright.trainer.sources import LoaderSource, PulledBatches, find_transfer
from trainwright.trainer.steps import StepArguments, read_step
from trainwright.trainer.training_data import TrainData
from trainwright.trainer.uneven_round import UnevenRound


class TrainingRun(Run):
    """A call of fit, with the source of its training loaders and the validation loaders that it was given."""

    module: Module
    data: TrainData
    optimizer: Optimizer | None = None
    """The one to step; None under manual optimization, or without any."""
    follows_by_step = False
    """Whether a step-wise scheduler follows a metric."""
    has_own_step = False
    """Whether the optimizer's step is the module's own, or made with a closure."""

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
        self.is_manual = not module.automatic_optimization
        self.own: dict[str, Any] = {}
        """The parts of a step that the module overrides (optimizer_step and so on), by name."""
        self.schedulers: list[SchedulerConfig] = []
        self.window, self.progress = AccumulationWindow(), self.state.progress
        """The batches of the next optimizer step. Windows count from where the run resumes, since no checkpoint is saved
        within one."""
        self.uneven_round: UnevenRound | None = None
        """The current batch, if it is one of an uneven round."""
        self.pulled: PulledBatches | None = None
        """Where training_step takes its batches from; None if the loop gives them."""
        self.is_watched = False
        """Whether an epoch has begun, which is watched for oversights."""
        self.num_empty = 0
        """Batches of this run for which training_step returned None."""
        self.generators: dict[str, Any] | None = None
        """The generators of a checkpoint within an epoch; set once the hooks of the epoch's start have run again."""
        self.step_results: list[StepResult] = []
        """Results of the steps that the module's running optimizer_step has made."""
        self.waiting_saves: list[tuple[str, bool, bool, bool]] = []
        """Checkpoints requested within a batch, a window or an epoch's end, to be written after it: path, weights_only,
        blocking and overwrite."""
        self.plain_backwards = PlainBackwards()
        self.progress.follow(self.window)
        self.close_at_end(self._drop_batches)
        self.close_at_end(self.plain_backwards.close)

    def _drop_batches(self) -> None:
        """Free what holds a batch: the Trainer keeps this run until its next one."""
        self.pulled = self.uneven_round = None

    def prepare(
        self, arguments: StepArguments, optimization: Optimization, own: dict[str, Any], validation: LoaderSource | None
    ) -> None:
        """Take what the strategy has made of the settings, what training_step takes, and what the module overrides."""
        settings, seconds = self.settings, self.settings.validation_seconds
        self.validation_clock = (
            None if seconds is None else IntervalClock(seconds, self.engine.connection.sync_point("validation"))
        )
        self.accumulate = optimization.accumulate
        if self.accumulate != settings.accumulate_grad_batches:  # otherwise setup() may have set another number
            self.trained.accumulate(self.accumulate)
        if validation is not None:
            self.validation = Evaluation(self, self.module, "validation", validation)
        self.clipping = Clipping.needed(optimization.clip_norm, optimization.clip_value)
        self.transfer = find_transfer(self.engine, self.module, self.datamodule, self.profiler)
        self.takes_index, self.pulls, self.own = arguments.takes_index, arguments.pulls, own
        self.before_zero_grad, self.before_backward = (
            self.hooks["on_before_zero_grad"],
            self.hooks["on_before_backward"],
        )
        self.after_backward, self.before_step = self.hooks["on_after_backward"], self.hooks["on_before_optimizer_step"]
        self.clears_plainly = not self.before_zero_grad and "optimizer_zero_grad" not in own
        data = self._train_data()
        if self.validation is not None:
            data.plan_validation()
        self.is_prepared = True

    def _train_data(self) -> TrainData:
        """Return the training data, not loaded if this makes it."""
        if self.trained.data is None:
            self.trained.data = self.data = TrainData(
                self.source,
                self.engine,
                self.settings,
                self.state,
                {**self.loader_options, "in_order": self.in_order},
                pulls=read_step(self.module, "training_step").pulls,
                note=self.stages.note_training,
            )
            self.close_at_end(self.data.close)
        return self.data

    def load_training_data(self) -> None:
        self._train_data().load()

    def take_schedulers(self, schedulers: list[SchedulerConfig]) -> None:
        """Take what configure_optimizers has returned of schedulers, once the engine has the optimizers."""
        self.trained.schedulers = self.schedulers = schedulers
        self.engine.script.note_schedulers([each.scheduler for each in schedulers])
        self.follows_by_step = any(each.interval == "step" and each.is_plateau for each in schedulers)

    def replace_schedulers(self) -> None:
        """Replace the schedulers by the one of a callback, if it has one."""
        if self.optimizer is None:
            return
        returned = self.hooks.call("configure_lr_scheduler", unwrap_optimizer(self.optimizer))
        scheduler = next((each for each in returned if each is not None), None)
        # It is returned at each epoch's start, and replaces the others once.
        if scheduler is not None and all(each.scheduler is not scheduler for each in self.schedulers):
            self.take_schedulers([SchedulerConfig(scheduler)])

    def take_optimizers(
        self, optimizers: list[Optimizer], prepared: list[PreparedOptimizer], *, with_closure: bool
    ) -> None:
        """Take the optimizers as the strategy has made them; `with_closure`: the one to step gets a closure."""
        self.trained.optimizers, self.trained.prepared_optimizers = optimizers, prepared
        if with_closure:
            self.own["closure"] = True
        if optimizers and not self.is_manual:
            self.optimizer = optimizers[0]
        self.has_own_step = bool(self.own.keys() & {"optimizer_step", "configure_gradient_clipping", "closure"})

    def begin_uneven_round(self, index: int) -> None:
        """Begin a batch of an uneven round, in which this rank may have no sample."""
        collector = self.logbook.collector
        assert collector is not None
        is_dummy = self.data.loader.weight_at(index) == 0.0
        self.uneven_round = UnevenRound(collector, self.module, self.callbacks, is_dummy)

    def end_uneven_round(self) -> None:
        """End the batch of an uneven round, if it is one."""
        if self.uneven_round is not None:
            self.uneven_round.end()
            self.uneven_round = None

    def count_empty(self) -> None:
        """Count a batch for which training_step returned None."""
        self.num_empty += 1

    @property
    def weight(self) -> float:
        """Return the weight of this rank in the round of the current batch; 1.0 if all ranks have equally many samples."""
        index = self.state.batch if self.pulled is None else self.pulled.count - 1
        return self.data.loader.weight_at(index) if index in self.data.uneven else 1.0

    def backward(self, loss: Tensor, send: Any, options: dict[str, Any]) -> None:
        """Send a loss backward under manual optimization, weighted as its round is, and call the hooks."""
        if self.running_call is not None:
            self.window.hold_gradients()  # until an optimizer steps
            if self.data.uneven and (weight := self.weight) != 1.0:
                loss = loss * weight
        with self.plain_backwards.own():
            super().backward(loss, send, options)

    def watch_backwards(self) -> None:
        """Refuse plain backwards of manual optimization, if the strategy or the precision does a part of a backward."""
        strategy, is_scaled = self.engine.strategy, self.engine.precision.has_scaler
        if (
            self.is_manual
            and (is_scaled or self.engine.world_size > 1)
            and strategy.capabilities.gradients_are_parameters
        ):
            self.plain_backwards.watch(self.module)

    def wait_with(self, generators: dict[str, Any]) -> None:
        """Set these generators once the hooks of the epoch's start have run."""
        self.generators = generators

    def set_waiting_generators(self) -> None:
        """Set the generators that have waited, if any."""
        if self.generators is not None:
            set_rng_state(self.generators)
            self.generators = None

    def begin_windows(self) -> None:
        """Begin an epoch's windows, of the length that the Trainer has now."""
        self.accumulate = self.trained.accumulate_grad_batches
        if not self.is_manual:  # otherwise gradients that on_train_epoch_start has sent backward wait for a step
            self.window.drop()

    def batches(self) -> tuple[Iterator[tuple[Any, bool]], bool]:
        """Return an iterator of (batch on its device, is it the epoch's last) from the state's position on.

        And whether the run is past the epoch's last batch. If the epoch's length is unknown, that shows only by reading on.
        """
        start, transfer, data = self.state.batch, self.transfer, self.data
        loader, length = data.loader, data.num_batches
        data.plan_states(self.accumulate, self.checkpoint_callbacks)
        # Only loaders that are the ranks' own may end on one rank before another.
        all_have = self._all_have if length is None and not loader.ends_together else None
        pairs = with_last(loader, start, length, data.most_batches, all_have=all_have)
        is_over = length is not None and start >= length
        if length is None and start:
            first = list(islice(pairs, 1))
            pairs, is_over = chain(first, pairs), not first
        if is_measuring(self.profiler):
            pairs = self.profiler.timed_iterator(pairs, "train_dataloader_next")
        is_first, self.is_watched = not self.is_watched, True
        if is_first:
            warn_of_evaluation_mode(self.module, self.trained.optimizers)
        if is_first and (length is None or length > LONG_EPOCH):
            pairs = watching(
                pairs, self.stages.train_dataloader, self.engine.device, self.engine.environment.local_world_size
            )
        if self.pulls:
            return self._pulled(pairs), is_over
        if transfer is None:
            return pairs, is_over
        if transfer.may_go_ahead:
            moved = Prefetcher(pairs, self.engine.device, ahead=loader.may_read_ahead)
            return ((transfer.arrived(batch), is_last) for batch, is_last in moved), is_over
        return ((transfer(batch), is_last) for batch, is_last in pairs), is_over

    def _all_have(self, has_batch: bool) -> bool:
        """Return whether each rank still has a batch. Collective: call on every rank."""
        if self.engine.world_size == 1:
            return has_batch
        # NOTE: waits for the device at each batch; with a length, or sharded loaders, it is not called.
        return bool(self.engine.reduce(torch.tensor([int(has_batch)]), "min").item())

    def _pulled(self, pairs: Iterator[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
        self.pulled = batches = PulledBatches(
            pairs, self.transfer, self.state.batch, self.logbook, self.engine.precision.step_context
        )
        while not batches.is_at_end:
            taken = batches.count
            yield batches, batches.holds_last
            if batches.count == taken:
                raise RuntimeError(
                    "training_step took no batch from its dataloader_iter; call next(dataloader_iter) in it."
                )

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
        last, is_stopped = self.settings.last_epoch, self.stop.is_due(self.window.is_open)
        return (is_stopped and not self.state.is_unfinished) or (last is not None and self.state.epoch >= last)

    def may_save(self, weights_only: bool) -> bool:
        """Return whether a checkpoint can be written now; else it waits for the end of the window, the batch or the epoch.

        A checkpoint within an epoch holds no gradients that wait for a step, a resumed run would draw and train on a batch
        again that is not counted, and no run resumes within an epoch's end.
        """
        if self.running_call is None:
            return True
        is_counted = self.state.total_batches != self.progress.batches_before
        # In a batch that has failed, a save would wait for an end that does not come.
        is_within_batch = self.progress.is_in_batch and not is_counted and not self.stop.was_cut
        return not self.window.is_open and (weights_only or not (is_within_batch or self.progress.phase in ENDING))

    def obstacle(self, error: BaseException) -> str:
        """Return why a run that fails here cannot be resumed exactly; "" if it can."""
        state, phase, strategy = self.state, self.progress.phase, self.engine.strategy
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
        if self.progress.is_evaluating and state.validated_at == state.total_batches:
            return "the run failed at the end of a validation"
        return ""

    def _has_stepped(self, error: BaseException) -> bool:
        """Return whether an optimizer may have changed weights in the batch that failed with this error."""
        state, before = self.state, (self.progress.batches_before, self.progress.steps_before)
        # Steps of torch's own optimizers are not counted under manual optimization.
        is_uncounted = self.is_manual and state.total_batches > 0 and not state.step
        frames = (frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "step")
        is_within = any(frame.f_globals.get("__name__", "").startswith("trainwright.") for frame in frames)
        return is_uncounted or is_within or (state.total_batches, state.step) != before
