"""The training run: what the training loop reads at every batch, and what it keeps from one batch to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from trainwright.data.loaders import with_last
from trainwright.data.transfer import Prefetcher
from trainwright.engine.engine import Engine
from trainwright.engine.optimizers import SchedulerConfig
from trainwright.engine.window import AccumulationWindow
from trainwright.module import Module
from trainwright.profilers.instrumentation import is_measuring
from trainwright.strategies.base import Clipping, StepResult
from trainwright.trainer.clock import IntervalClock
from trainwright.trainer.evaluate import Evaluation
from trainwright.trainer.hooks import HookTable
from trainwright.trainer.phase import ENDING, Phase, Progress
from trainwright.trainer.sources import BatchTransfer, PulledBatches
from trainwright.trainer.state import TrainerState
from trainwright.trainer.training_data import TrainData
from trainwright.trainer.uneven_round import UnevenRound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.trainer.trainer import Trainer


@dataclass
class TrainingRun:
    """What the loop reads at every batch, looked up once."""

    trainer: Trainer
    engine: Engine
    module: Module
    hooks: HookTable
    progress: Progress
    state: TrainerState
    data: TrainData
    validation: Evaluation | None
    """None where nothing is validated."""
    validation_clock: IntervalClock | None
    """Set where validations come by time."""
    saves_end: bool
    """Whether the run is saved where it ends, for the same command to find."""
    is_manual: bool
    """Whether training_step itself sends losses backward and steps."""
    optimizer: Optimizer | None
    """The one to step; None under manual optimization, or without any."""
    schedulers: list[SchedulerConfig]
    accumulate: int
    clipping: Clipping | None
    transfer: BatchTransfer | None
    """None where a batch is used as it comes."""
    takes_index: bool
    """Whether training_step wants the batch's index."""
    pulls: bool
    """Whether training_step takes its batches from an iterator itself."""
    own: dict[str, Any]
    """The parts of a step that the module makes in its own way (optimizer_step and its like), by name."""
    has_own_step: bool = False
    """Whether the optimizer's step is made in the module's own way, or with a closure."""
    uneven_round: UnevenRound | None = None
    """The batch at hand, where it is one of an uneven round."""
    pulled: PulledBatches | None = None
    """Where training_step takes its batches from; None where the loop gives them."""
    window: AccumulationWindow = field(default_factory=AccumulationWindow)
    """The batches of the next optimizer step. Windows count from where the run resumes: no checkpoint stands within one."""
    num_empty: int = 0
    """Batches of this run for which training_step returned None."""
    generators: dict[str, Any] | None = None
    """As a checkpoint within an epoch holds them; set once the hooks of the epoch's start have run again."""
    batches_begun: int = 0
    """Calls of train_batch in this run, alike on every rank: what tells which rank is further on."""
    is_last_batch: bool = False
    row_is_due: bool = False
    """Whether the loggers' row of the latest step is still to be written."""
    step_results: list[StepResult] = field(default_factory=list)
    """What the steps of the module's own optimizer_step did that runs now."""
    waiting_saves: list[tuple[str, bool, bool, bool]] = field(default_factory=list)
    """Checkpoints that were asked for within a window or an epoch's ending, and are written when that is over: the path, and
    whether it is to hold the weights only, to block, and to overwrite."""

    def __post_init__(self) -> None:
        hooks = self.hooks
        self.before_zero_grad, self.before_backward = hooks["on_before_zero_grad"], hooks["on_before_backward"]
        self.after_backward, self.before_step = hooks["on_after_backward"], hooks["on_before_optimizer_step"]
        self.clears_plainly = not self.before_zero_grad and "optimizer_zero_grad" not in self.own

    def begin_windows(self) -> None:
        """Begin an epoch's windows, of the length that the trainer has now."""
        self.accumulate = self.trainer.accumulate_grad_batches
        if not self.is_manual:  # else gradients that on_train_epoch_start has sent backward wait for a step
            self.window.drop()

    def may_save(self, weights_only: bool) -> bool:
        """Return whether a checkpoint can be written now; else it waits for the end of the window, or of the epoch.

        Gradients that wait for a step are in no checkpoint, and no run resumes within an epoch's end.
        """
        return not self.window.is_open and (weights_only or self.progress.phase not in ENDING)

    @property
    def obstacle(self) -> str:
        """Return why a run that fails here cannot be resumed exactly from where it stands; nothing where it can."""
        state, phase = self.state, self.progress.phase
        if self.engine.world_size > 1:
            return f"it would take all {self.engine.world_size} ranks"
        if phase is Phase.BATCH or self.window.is_open:
            return "the run failed in the middle of a batch, or of an accumulation window"
        is_at_end = phase in (Phase.EPOCH_END, Phase.VALIDATION_AT_END)
        if is_at_end or state.epoch_ended or state.batch >= self.trainer.num_training_batches:
            return "the run failed at the end of an epoch"
        if self.progress.is_evaluating and state.validated_at == state.total_batches:
            return "the run failed at the end of a validation"
        return ""

    @property
    def validates_within(self) -> bool:
        """Return whether a validation may be due within an epoch."""
        by_time = self.validation_clock is not None
        return self.validation is not None and (self.data.validate_every is not None or by_time)

    @property
    def weight(self) -> float:
        """Return this rank's part in the round of the current batch, relative to an equal part."""
        index = self.state.batch if self.pulled is None else self.pulled.count - 1
        return self.data.loader.weight_at(index) if index in self.data.uneven else 1.0

    def begin_uneven_round(self, index: int) -> None:
        """Begin a batch of an uneven round, in which this rank may have no sample."""
        collector = self.trainer.logbook.collector
        assert collector is not None
        is_ghost = self.data.loader.weight_at(index) == 0.0
        self.uneven_round = UnevenRound(collector, self.module, self.trainer.callbacks, is_ghost)

    def end_uneven_round(self) -> None:
        """End the batch of an uneven round, if it is one."""
        if self.uneven_round is not None:
            self.uneven_round.end()
            self.uneven_round = None

    def write_row(self) -> None:
        """Write the row of a step that is due for one; a save writes it before, since no resumed run would."""
        self.row_is_due = False
        self.trainer.logbook.log_step()

    def batches(self) -> tuple[Iterator[tuple[Any, bool]], bool]:
        """Return what yields (batch on its device, whether it is the epoch's last), from the state's position on.

        And whether the run stands behind the epoch's last batch; of an epoch whose length is not known, reading on tells.
        """
        start, transfer, data = self.state.batch, self.transfer, self.data
        loader, length = data.loader, data.num_batches
        data.plan_states(self.accumulate, self.trainer.checkpoint_callbacks)
        # Only loaders that the ranks did not get from us may end on one rank before another.
        all_have = self._all_have if length is None and not loader.ends_together else None
        pairs = with_last(loader, start, length, data.most_batches, all_have=all_have)
        is_over = length is not None and start >= length
        if length is None and start:
            first = list(islice(pairs, 1))
            pairs, is_over = chain(first, pairs), not first
        if is_measuring(self.trainer.profiler):
            pairs = self.trainer.profiler.timed_iterator(pairs, "train_dataloader_next")
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
        return bool(self.engine.reduce(torch.tensor([int(has_batch)]), "min").item())

    def _pulled(self, pairs: Iterator[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
        self.pulled = batches = PulledBatches(
            pairs, self.transfer, self.state.batch, self.trainer.logbook, self.engine.precision.step_context
        )
        while not batches.is_at_end:
            taken = batches.count
            yield batches, batches.holds_last
            if batches.count == taken:
                raise RuntimeError(
                    "training_step took no batch from its dataloader_iter; call next(dataloader_iter) in it."
                )
