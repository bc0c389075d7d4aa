"""The prepared run: a call of fit with its data, its validation, its optimizers and the plan of its loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from trainwright.data.datamodule import DataModule
from trainwright.data.seeding import rng_state, set_rng_state
from trainwright.distributed.sync_points import SyncPoint
from trainwright.engine.optimizers import (
    SchedulerConfig,
    check_scheduler,
    may_use_closure,
    needs_closure,
    read_optimizers,
    use_fused,
)
from trainwright.engine.prepared import PreparedOptimizer
from trainwright.engine.window import AccumulationWindow
from trainwright.faults.nan_policy import NanGuard, RunParts, refuse_policy
from trainwright.faults.tensor_checks import PlainBackwards
from trainwright.module import Module, is_overridden
from trainwright.rank_zero import rank_zero_info, rank_zero_warn
from trainwright.strategies.base import Clipping, Optimization, StepResult
from trainwright.strategies.divided_optimizers import unwrap_optimizer
from trainwright.trainer.checkpoint_choice import Choice
from trainwright.trainer.evaluate import Evaluation
from trainwright.trainer.hooks import Hooks
from trainwright.trainer.run import Parts, Run
from trainwright.trainer.settings import Settings
from trainwright.trainer.sources import BatchTransfer, LoaderSource, find_source, find_transfer, num_step_arguments
from trainwright.trainer.training_data import TrainData
from trainwright.trainer.uneven_round import discarded


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


@dataclass(frozen=True)
class LoopPlan:
    """The branches that the loop of one fit has, chosen once when the fit is prepared."""

    is_manual: bool
    num_arguments: int
    """How many of the batch and its index training_step takes."""
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
    validation_clock: IntervalClock | None
    """Says when a validation by time is due."""

    has_own_step: bool
    """Whether the module takes part in the optimizer's step, or the step gets a closure."""
    batch_start: Hooks
    batch_end: Hooks
    before_backward: Hooks
    after_backward: Hooks
    before_step: Hooks


class PreparedRun(Run):
    """A call of fit, with the source of its training loaders and the validation loaders that it was given."""

    module: Module
    plan: LoopPlan
    window: AccumulationWindow
    optimizer: Optimizer | None = None
    """The optimizer to step. None under manual optimization, or without optimizers."""
    accumulate = 1
    """Batches of a window in this epoch."""
    scales_losses = False
    """Whether the losses and gradients of a window are scaled in this epoch."""

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
        self._source, self._given_validation = source, given_validation
        options = {**self.loader_options, "in_order": self.in_order}
        note = self.stages.note_training
        self.data = TrainData(source, self.engine, self.settings, self.state, options, note=note)
        self.update_trained(data=self.data)
        self.close_at_end(self.data.close)
        self.validation: Evaluation | None = None
        self.window = AccumulationWindow(self.engine, by_tokens=self.settings.accumulate_by == "tokens")
        """The batches of the next optimizer step. Windows count from where the run resumes, since no checkpoint is saved
        within one."""
        self.plain_backwards = PlainBackwards()
        self.close_at_end(self.plain_backwards.close)
        self.step_results: list[StepResult] = []
        """Results of the steps that the module's running optimizer_step has made."""

    def prepare(self, roll_back: Callable[[], str]) -> None:
        """Wrap the module, make its optimizers, choose the branches of the loop and call on_fit_start. Collective.

        `roll_back` returns to the newest checkpoint.

        Raises:
            ValueError: settings that the module's optimization rules out.
        """
        settings, engine, module = self.settings, self.engine, self.module
        is_manual = not module.automatic_optimization
        if is_manual and (
            settings.accumulate_grad_batches > 1 or settings.gradient_clip_val or self.window.tokens is not None
        ):
            raise ValueError(
                "accumulate_grad_batches, accumulate_by and gradient_clip_val need automatic optimization, but this module has "
                "automatic_optimization = False. Accumulate and clip in training_step, and leave them at their defaults, in "
                "trainwright launch and its config too."
            )
        self._watch_numbers(roll_back)
        num_arguments = num_step_arguments(module, "training_step")
        engine.take_seed()
        engine.precision.reset()
        self.prepare_module(module)
        optimization = engine.strategy.resolve(
            Optimization(not is_manual, settings.clip_norm, settings.clip_value, settings.accumulate_grad_batches)
        )
        engine.prepare_module(module, optimization)
        self.accumulate = optimization.accumulate
        if self.accumulate != settings.accumulate_grad_batches:  # otherwise setup() may have set another number
            self.update_trained(accumulate_grad_batches=self.accumulate)
        self._prepare_data()
        first = self._prepare_optimizers()
        overrides = self.hooks.find_step_parts()
        has_hooks = bool(self.hooks["on_before_zero_grad"]) or "optimizer_zero_grad" in overrides
        gives_closure = first is not None and _closure_is_wanted(self.settings, self.accumulate, engine, first)
        clock = None
        if settings.validation_seconds is not None:
            clock = IntervalClock(settings.validation_seconds, engine.connection.sync_point("validation"))
        self.plan = LoopPlan(
            is_manual=is_manual,
            num_arguments=num_arguments,
            transfer=find_transfer(engine, module, self.datamodule, self.profiler),
            overrides=overrides,
            cleared_first=None if has_hooks else self.optimizer,
            gives_closure=gives_closure,
            clipping=Clipping.needed(optimization.clip_norm, optimization.clip_value),
            log_every=settings.log_every,
            validation_clock=clock,
            has_own_step=gives_closure
            or not overrides.keys().isdisjoint({"optimizer_step", "configure_gradient_clipping"}),
            batch_start=self.hooks["on_train_batch_start"],
            batch_end=self.hooks["on_train_batch_end"],
            before_backward=self.hooks["on_before_backward"],
            after_backward=self.hooks["on_after_backward"],
            before_step=self.hooks["on_before_optimizer_step"],
        )
        self.hooks.call("on_fit_start")
        self.log_hyper_parameters()  # after a search's callback has set the value that the saved run has found
        self.replace_schedulers()  # a callback's scheduler has state, which a checkpoint restores

    def _watch_numbers(self, roll_back: Callable[[], str]) -> None:
        """Apply the nan_policy until the run ends (ValueError if this run cannot have it)."""
        settings, state = self.settings, self.state
        saving = [each for each in self.trainer.checkpoint_callbacks if each.keeps_any and not each.save_weights_only]
        saves = bool(saving) or bool(settings.fast_dev_run)
        refuse_policy(settings.nan_policy, is_automatic=self.module.automatic_optimization, saves=saves)
        parts = RunParts(
            lambda: state.step,
            "" if settings.fast_dev_run else self.trainer.log_dir or self.root,
            rng_state,
            set_rng_state,
            lambda: f" (epoch {state.epoch}, batch {state.batch})",
            lambda: discarded(self.module, self.logbook.collector),
            roll_back if settings.nan_policy == "rollback" else str,
        )
        self.numbers = NanGuard(self.engine, settings.nan_policy, parts, settings.log_every)
        self.numbers.install()
        self.close_at_end(self.numbers.remove)

    def _prepare_data(self) -> None:
        """Make the training data and the validation, and load loaders that the call was given. Collective."""
        source = self._find_validation()  # here, because setup() may have added hooks
        if source is not None:
            self.validation, self.enable_validation = Evaluation(self, self.module, "validation", source), True
            self.data.plan_validation()
        self.is_prepared = True
        # They are checked before anything is run; hooks are called when it is their turn.
        if self._source.owner is None:
            self.data.load()
            if self.validation is not None and self.validation.source.owner is None:
                self.validation.load()

    def _find_validation(self) -> LoaderSource | None:
        """Return the source of the validation loaders. None if there are none, or with limit_val_batches=0."""
        name, has_step = type(self.module).__name__, is_overridden("validation_step", self.module, Module)
        source = find_source(
            "validation", self._given_validation, self.datamodule, self.module, "val_dataloaders", "fit"
        )
        if not source.is_defined and has_step:
            rank_zero_info("%s has a validation_step, but fit has no validation data.", name)
        # The limit is the same on every rank, while a single rank may have no batch.
        if not source.is_defined or self.settings.limit_val_batches == 0:
            return None
        if has_step:
            return source
        rank_zero_warn(
            f"there are validation loaders, but {name} has no validation_step, so fit does not validate. Define it, or do not "
            "pass the loaders.",
            stacklevel=2,
        )
        return None

    def _prepare_optimizers(self) -> Optimizer | None:
        """Make the module's optimizers and schedulers; return the optimizer of automatic optimization. Collective."""
        engine, module, is_manual = self.engine, self.module, not self.module.automatic_optimization
        returned = self.profiler.timed(module.configure_optimizers, "[module] configure_optimizers")()
        makes_none = returned is None and engine.strategy.capabilities.makes_optimizer
        optimizers, schedulers = ([], []) if makes_none else read_optimizers(returned, is_manual=is_manual)
        if not is_manual and len(optimizers) > 1:
            raise ValueError(
                f"configure_optimizers returned {len(optimizers)} optimizers, but automatic optimization steps one. Set "
                "automatic_optimization = False in the module and step them in training_step."
            )
        engine.replaced.update(optimizers)
        if self.settings.fused_optimizers:
            for optimizer in optimizers:
                use_fused(optimizer, [module])
        wrapped = engine.prepare_optimizers(optimizers)
        self._take_schedulers(schedulers)
        before = self._announce_step if is_manual else None
        prepared = [
            PreparedOptimizer(
                engine, optimizer, before_step=before, after_step=self._count_step, has_loss=not is_manual
            )
            for optimizer in wrapped
        ]
        self.update_trained(optimizers=wrapped, prepared_optimizers=prepared)
        if wrapped and not is_manual:
            self.optimizer = wrapped[0]
        return optimizers[0] if optimizers and not is_manual else None

    def _take_schedulers(self, schedulers: list[SchedulerConfig]) -> None:
        self.update_trained(schedulers=schedulers)
        self.engine.script.note_schedulers([config.scheduler for config in schedulers])

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
            self._take_schedulers([config])

    def _announce_step(self, optimizer: Optimizer) -> None:
        """Call the hooks before a step of manual optimization."""
        self.plain_backwards.refuse()
        if self.hooks["on_before_optimizer_step"]:
            with self.engine.precision.step_context():  # where a step of automatic optimization calls them too
                self.engine.strategy.finalize(optimizer)
                self.hooks.call("on_before_optimizer_step", optimizer)

    def _count_step(self, result: StepResult) -> None:
        """Count a step of manual optimization; one within the module's optimizer_step once that has returned."""
        if self.module.automatic_optimization:
            self.step_results.append(result)
            return
        self.state.count_manual_step(result.skipped)
        self.window.drop()


def _closure_is_wanted(settings: Settings, accumulate: int, engine: Any, optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step gets a closure: it needs one, or is the user's own class and may use one.

    Raises:
        ValueError: it needs one, which these settings rule out.
    """
    # A later call could repeat only the window's last batch, and would use scaled gradients under a loss scale.
    is_plain = accumulate == 1 and settings.accumulate_by == "batches"
    can_be_given = is_plain and engine.precision.takes_closure and engine.strategy.capabilities.takes_closure
    if needs_closure(optimizer) and not can_be_given:
        raise ValueError(
            f"configure_optimizers returned {type(optimizer).__name__}, whose step computes the loss several times. That "
            f"cannot be done with accumulate_grad_batches={accumulate}, accumulate_by={settings.accumulate_by!r}, "
            f"precision={engine.precision.name!r} and strategy={engine.strategy.name!r}. Use accumulate_grad_batches=1, "
            "accumulate_by='batches', a precision without a loss scale, and one device or ddp, or choose another optimizer."
        )
    return can_be_given and (needs_closure(optimizer) or may_use_closure(optimizer))
