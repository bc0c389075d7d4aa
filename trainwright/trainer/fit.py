"""Fit: the training loop, top to bottom.

    fit:         for each epoch: fit_epoch.
    fit_epoch:   for each batch of this rank's shard, in the order of (seed, epoch):
                     train_batch; log every n steps.
                     validate, if an interval within the epoch has passed and no window is open.
                 log the last step, if no row was due yet; step the epoch-wise schedulers; validate, if due.
                 reduce the epoch's metrics over the ranks; save a checkpoint (callbacks).
    train_batch: zero_grad         at a window's start; after training_step if a hook or the module takes part in it.
                 training_step
                 backward          the loss divided by the window's own length.
                 clip, step        at a window's end.
                 step the step-wise schedulers, unless the step was skipped.

A window is the batches of one optimizer step (`accumulate_grad_batches`); the last one of an epoch may be shorter. Under
manual optimization training_step does all of train_batch itself. resume.py has the steps before the loop, hooks.py the order
of the hooks, epoch_batches.py the batches, engine/window.py the scale of a loss, optimization.py the steps.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from trainwright.engine.optimizers import clear_gradients
from trainwright.trainer.epoch_batches import Batch, EpochBatches
from trainwright.trainer.epoch_end import (
    close_epoch,
    follows_metric_by_step,
    pass_over,
    step_plateau_schedulers,
    validate,
    validate_within,
    validates_within,
    validation_is_due,
)
from trainwright.trainer.optimization import (
    clear_with_hooks,
    keep_unstepped_gradients,
    run_training_step,
    send_backward,
    step,
)
from trainwright.trainer.run_position import AFTER_EPOCH_START
from trainwright.trainer.saving import open_epoch
from trainwright.trainer.stop import EvaluationAbandoned
from trainwright.trainer.training_run import TrainingRun


def fit(run: TrainingRun) -> None:
    """Train from the run's position until its limits are reached. Collective."""
    state, stop = run.state, run.stop
    # After a signal in a validation the run is saved as it was before it.
    with suppress(EvaluationAbandoned):
        while not is_done(run):
            fit_epoch(run)
            run.data.load_state_dict(run.data.state_dict())  # where the next epoch, or a later save, begins
            if not state.epoch_ended:
                break
            state.next_epoch()
    run.engine.strategy.check_gradients(partial(run.engine.ranks.exchange, call="the end of the fit"))
    state.restore_rng(AFTER_EPOCH_START)  # nothing was left to train
    stop.finish()
    if not stop.number:
        run.hooks.call("on_before_train_end", partial(pass_over, run))
    run.logbook.stop_collecting()
    run.hooks.call("on_train_end")


def is_done(run: TrainingRun) -> bool:
    """Return whether no epoch is left to train, nor the rest of one that a stopped run was resumed within."""
    last, is_stopped = run.settings.last_epoch, run.stop.is_due()
    is_within_epoch = run.state.batch > 0 and not run.state.epoch_ended
    return (is_stopped and not is_within_epoch) or (last is not None and run.state.epoch >= last)


def fit_epoch(run: TrainingRun) -> None:
    """Train one epoch, or the rest of it. Collective."""
    batches = begin_epoch(run)
    train = run_training_step if run.plan.is_manual else train_batch
    validates, has_plateau_steps = validates_within(run), follows_metric_by_step(run)
    for batch in batches:
        if not run.begin_batch(batch):
            break
        outputs = train(run, batch)
        run.state.end_batch(batch.index)
        if has_plateau_steps:
            step_plateau_schedulers(run, batch.is_last)
        run.end_batch(batch, outputs)
        if validates:
            validate_within(run, batch)
        if run.stop.is_due_after(run.state.progress.has_stepped or run.plan.is_manual):
            break
    end_epoch(run, batches.is_complete)


def begin_epoch(run: TrainingRun) -> EpochBatches:
    """Return the batches of an epoch, or of the rest of it, after all that comes before them. Collective."""
    state = run.state
    if run.logbook.collector is None:
        run.logbook.start(run.module)
    state.begin_epoch()
    if run.data.reload_if_due() and run.validation is not None:
        run.validation.renew()
    run.data.seek(run.trained.resume_source)
    run.hooks.call("on_train_epoch_start")
    batches = run.begin_batches()
    if validates_within(run) and state.batch and not batches.is_complete and validation_is_due(run):
        validate(run, within=True)  # the checkpoint was saved before it
    return batches


def train_batch(run: TrainingRun, batch: Batch) -> Any:
    """Run one batch through training_step, backward and, at its window's end, the optimizer; return the outputs."""
    window, cleared = run.window, run.plan.cleared_first
    if run.accumulate > 1:
        window.begin_batch(run.accumulate, batch.batches_left, batch.is_last)
    if window.is_at_start and cleared is not None:
        clear_gradients(cleared)
    outputs = run_training_step(run, batch)
    if window.is_at_start and cleared is None:
        clear_with_hooks(run, batch)
    loss = send_backward(run, batch, outputs)
    if window.is_at_end:
        step(run, batch, loss)
    if run.accumulate > 1:
        window.end_batch()
    return outputs


def end_epoch(run: TrainingRun, is_complete: bool) -> None:
    """End an epoch, or leave it because the run stops within it, and let callbacks score and save it. Collective."""
    state, hooks = run.state, run.hooks
    run.end_batches()
    if run.stop.number:  # after a signal the resumed run does the rest of the epoch
        return
    if run.plan.is_manual:
        keep_unstepped_gradients(run)
    if not is_complete:
        leave_epoch(run)
    with state.ending_epoch(is_complete):
        close_epoch(run, is_complete)
    hooks.call_late()
    if is_complete:
        hooks.call("on_save_point")
    run.save_waiting()  # after EarlyStopping, whose state belongs into the checkpoint
    run.stop.agree()
    run.logbook.flush()


def leave_epoch(run: TrainingRun) -> None:
    """Save a run that stops within an epoch as its latest batch has left it. Collective.

    A run that resumes there trains on as if this one had not stopped. The same command, with nothing left to train, calls
    on_train_epoch_end again, so nothing that this hook changes may be in the checkpoint.
    """
    run.state.stop_within_epoch(open_epoch(run))
    run.logbook.reduce()  # the score of a checkpoint may be a metric of this epoch
    run.hooks.call("on_train_epoch_stop")
    run.hooks.call("on_save_point")
    run.stop.save_end()
