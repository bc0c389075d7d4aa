"""The training run: what the training loop reads at every batch, and what it keeps from one batch to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from traceback import walk_tb
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.callbacks.model_summary import ModelSummary
from trainwright.callbacks.throughput_monitor import ThroughputMonitor, flops_of
from trainwright.data.transfer import map_tensors
from trainwright.devices.hardware import peak_flops
from trainwright.devices.host_waits import HostWaits
from trainwright.distributed.failures import is_secondary_failure
from trainwright.engine.optimizers import use_fused
from trainwright.profilers.base import is_measuring
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.epoch_batches import Batch, EpochBatches, Pairs
from trainwright.trainer.prepared_run import PreparedRun
from trainwright.trainer.run_position import AFTER_EPOCH_START, Phase
from trainwright.trainer.sources import parts_of
from trainwright.trainer.uneven_round import UnevenRound

TOO_MANY_EMPTY = 10
"""Batches without a loss at a run's beginning after which a warning says that nothing is trained."""


class TrainingRun(PreparedRun):
    """A call of fit in its loop."""

    batch: Batch | None = None
    """The current batch."""
    uneven_round: UnevenRound | None = None
    """The current batch, if it is one of an uneven round."""
    _is_timed = False
    _num_empty = 0
    """Batches of this run for which training_step returned None."""

    def begin_batches(self) -> EpochBatches:
        """Begin an epoch's windows, and return its batches from the state's position on.

        Called after the hooks of the epoch's start, which may freeze layers or change the windows' length. A run that resumes
        within the epoch continues here with the RNG state and the metrics of the checkpoint.
        """
        self.replace_schedulers()
        self.state.restore_rng(AFTER_EPOCH_START)
        self.logbook.resume_epoch()
        self.accumulate = self.trained.accumulate_grad_batches
        self.scales_losses = self.accumulate > 1 or self.window.tokens is not None
        if not self.plan.is_manual:  # otherwise gradients that on_train_epoch_start has sent backward wait for a step
            self.window.drop()
        self.engine.refresh_trainable()
        is_scaled, capabilities = self.engine.precision.has_scaler, self.engine.strategy.capabilities
        if self.plan.is_manual and (is_scaled or self.engine.world_size > 1) and capabilities.gradients_are_parameters:
            self.plain_backwards.watch(self.module)
        self.engine.sync_gradients(True)
        if self.settings.fused_optimizers:
            for optimizer in self.trained.optimizers:
                use_fused(optimizer, [self.module])  # a hook may have added groups
        self.data.plan_states(self.accumulate, self.trainer.checkpoint_callbacks)
        plan = self.plan
        return EpochBatches(self.data, plan.num_arguments, plan.transfer, self.engine, self._timed, self.stop)

    def _timed(self, pairs: Pairs) -> Pairs:
        """Return the same batches, timed by the profiler and for the timeline."""
        if not self._is_timed:
            self._is_timed = True
            self.close_at_end(self._drop_batch)
            warn_of_evaluation_mode(self.module, self.trained.optimizers)
            loaders, processes = parts_of(self.stages.train_dataloader), self.engine.environment.local_world_size
            self.state.timeline.begin(loaders, processes, self.engine.device, self.state.step)
            self.close_at_end(self._show_timeline)
            if self.settings.detect_syncs and self.engine.rank == 0:
                self._detect_syncs()
        pairs = self.state.timeline.timed(pairs)
        if is_measuring(self.profiler):
            return self.profiler.timed_iterator(pairs, "train_dataloader_next")
        return pairs

    def begin_batch(self, batch: Batch) -> bool:
        """Begin a training batch; return False if on_train_batch_start ends the epoch before it. Collective then."""
        collector = self.logbook.training_collector
        assert collector is not None
        self.batch = batch
        self.state.progress.begin_batch(self.state, batch.is_last)
        collector.begin_batch(batch.value, batch.index)
        if batch.is_uneven:
            self.uneven_round = UnevenRound(collector, self.module, batch.is_dummy)
        if not self.plan.batch_start or not batch.arguments:
            return True
        if -1 not in self.hooks.call("on_train_batch_start", batch.value, batch.index):
            return True
        self._cancel_batch()
        batch.is_last = True
        return False

    def end_batch(self, batch: Batch, outputs: Any) -> None:
        """Call the hooks of a counted batch's end, and write the row and the checkpoints that are due. Collective."""
        state, log_every = self.state, self.plan.log_every
        if outputs is None and not self.plan.is_manual:
            self._count_empty()
        if state.progress.has_stepped and log_every and state.batches_that_stepped % log_every == 0:
            self.logbook.mark_row_due()
        if self.uneven_round is not None:
            self.uneven_round.renew()
        if self.plan.batch_end:
            shown = _read_outputs(outputs) if self.hooks.outputs_are_read else {}
            self.hooks.call("on_train_batch_end", shown, batch.value, batch.index)
        state.progress.end_batches()
        if self.uneven_round is not None:
            self._end_uneven_round()
        if self.logbook.is_row_due:
            self.logbook.log_step()
            if self.numbers is not None:
                self.numbers.look(outputs)
        if self.waiting:
            self.save_waiting()

    def _end_uneven_round(self) -> None:
        if self.uneven_round is not None:
            self.uneven_round.end()
            self.uneven_round = None

    def _cancel_batch(self) -> None:
        """Drop a batch before its step, with the gradients of its window. Collective (RuntimeError if a rank trains on).

        Saves that have waited for the window's end wait for the epoch's: this batch was read and not trained on.
        """
        self.state.progress.cancel_batch()
        self.engine.ranks.wait("the end of an epoch by -1 from on_train_batch_start")
        self._end_uneven_round()
        if self.optimizer is not None and self.window.is_open:
            self.optimizer.zero_grad()
            self.window.drop()
            self.engine.sync_gradients(True)

    def end_batches(self) -> None:
        """End the epoch's batches (RuntimeError if training_step has returned None for all of the first epoch)."""
        collector = self.logbook.training_collector
        assert collector is not None
        collector.begin_loader(None)
        self.state.timeline.enter("other")
        self.state.progress.end_batches()
        self._drop_batch()
        for loader in parts_of(self.stages.train_dataloader) if not self.stop.number else ():
            for part in (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)):
                if (share := getattr(part, "padding_share", None)) is not None:
                    # The maximum, because a resumed run logs the same value again.
                    self.module.log("padding_share", share, on_step=False, on_epoch=True, reduce_fx="max")
        is_empty = self._num_empty and self._num_empty == self.state.total_batches and self.optimizer is not None
        if is_empty and not self.stop.number:
            raise RuntimeError(
                f"training_step returned None for all {self._num_empty} batches of the first epoch, or the loader yielded None "
                "instead of them, so nothing was trained; return the loss (did you forget the return statement?), or set "
                "automatic_optimization = False and step yourself."
            )
        if self.numbers is not None and not self.stop.number:
            self.numbers.end_epoch()

    def _detect_syncs(self) -> None:
        """Print the lines at which the host waits for the device, until the run ends."""
        waits = HostWaits(self.engine.device, self.trainer.print)
        if waits.start():
            self.close_at_end(waits.stop)
            return
        rank_zero_warn(
            f"detect_syncs=True finds nothing on {self.engine.device.type}, where torch does not report that the host waits. "
            "Run it on a GPU, or omit it.",
            stacklevel=2,
        )

    def _show_timeline(self) -> None:
        """End the times of the fit, and print their line where a summary of the model was printed."""
        callbacks, is_quiet = self.trainer.callbacks, self.state.progress.has_failed or self.settings.fast_dev_run
        is_quiet = not self.state.timeline.end(self.state.step) or is_quiet
        if is_quiet or not any(isinstance(each, ModelSummary) for each in callbacks):
            return
        monitor = next((each for each in callbacks if isinstance(each, ThroughputMonitor)), None)
        flops = None if monitor is None else monitor.flops_per_batch
        peak = None if monitor is None else monitor.available_flops
        flops, peak = flops or flops_of(self.module), peak or peak_flops(self.engine.device)
        self.trainer.print(self.state.timeline.describe(self.engine.num_data_ranks, flops, peak))

    def _drop_batch(self) -> None:
        """Free the objects that hold a batch: the Trainer keeps this run until its next one."""
        self.batch = self.uneven_round = None

    def _count_empty(self) -> None:
        """Count a batch for which training_step returned None, and warn if the run has begun with nothing else."""
        self._num_empty += 1
        if self._num_empty == TOO_MANY_EMPTY == self.state.total_batches:
            rank_zero_warn(
                f"training_step returned None for the first {self._num_empty} batches, which skips them: nothing has been "
                "trained. Did you forget the return statement?",
                stacklevel=4,
            )

    def backward(self, loss: Tensor, send: Any, options: dict[str, Any]) -> None:
        """Send a loss backward under manual optimization, weighted as its round is, and call the hooks."""
        if self.running_call is not None:
            self.window.hold_gradients()  # until an optimizer steps
            if self.batch is not None:
                loss = self.window.scale(loss, self.batch.weight)
        self.plain_backwards.refuse()
        try:
            super().backward(loss, send, options)
        finally:
            self.plain_backwards.came.clear()

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


def _read_outputs(outputs: Any) -> dict[str, Any]:
    """Return training_step's outputs as on_train_batch_end gets them: a dict without graphs, with the loss as "loss"."""
    if outputs is None:
        return {}
    if isinstance(outputs, Tensor):
        return {"loss": outputs.detach()}
    return dict(map_tensors(Tensor.detach, outputs)) if isinstance(outputs, Mapping) else {"outputs": outputs}


def warn_of_evaluation_mode(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Warn of parts with dropout or batch norm that are in evaluation mode although an optimizer steps them."""
    stepped = {each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    for name, part in module.named_modules():
        # A layer without children was chosen separately, such as a batch norm that keeps its statistics.
        if part.training or not list(part.children()) or not any(map(_is_quiet, part.modules())):
            continue
        if not any(p.requires_grad and p in stepped for p in part.parameters()):
            continue
        shown = repr(name) if name else type(module).__name__
        rank_zero_warn(
            f"{shown} is in evaluation mode as training begins, as from_pretrained returns models: dropout and batch norm act "
            "as in evaluation. Call .train() in the module's __init__ or on_train_start, or freeze the parameters.",
            stacklevel=2,
        )
        return


def _is_quiet(layer: nn.Module) -> bool:
    """Return whether a layer would act in another way in training mode."""
    rate = getattr(layer, "p" if "Dropout" in type(layer).__name__ else "dropout", None)
    has_statistics = getattr(layer, "track_running_stats", False)
    return not layer.training and (has_statistics or (isinstance(rate, float) and rate > 0))
