"""Fit: the training loop, top to bottom.

    fit:         check a few validation batches, unless the run resumes
                 for each epoch: fit_epoch
    fit_epoch:   for each batch of this rank's shard, in the order of (seed, epoch):
                     train_batch; log every n steps
                     validate, if an interval within the epoch has passed and no window is open
                 log the last step, if no row was due yet; step the epoch-wise schedulers; validate, if due
                 reduce the epoch's metrics over the ranks; save a checkpoint (callbacks)
    train_batch: zero_grad         at a window's start; after training_step if a hook or the module takes part in it
                 training_step
                 backward          the loss divided by the window's own length
                 clip, step        at a window's end
                 step the step-wise schedulers, unless the step was skipped

A window is the batches of one optimizer step (`accumulate_grad_batches`); the last one of an epoch may be shorter. Under
manual optimization training_step does all of train_batch itself. hooks.py has the order of the hooks, engine/window.py what
losses are divided by, optimization.py the steps.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from trainwright.data.seeding import rng_state
from trainwright.engine.fused import use_fused
from trainwright.engine.optimizers import clear_gradients
from trainwright.trainer.evaluate import sanity_check, skip_none
from trainwright.trainer.optimization import (
    backward,
    begin_window,
    count_empty,
    hold_over_end,
    leave_window,
    read_loss,
    read_outputs,
    refuse_empty_epoch,
    step,
    step_schedulers,
)
from trainwright.trainer.oversights import warn_of_open_end
from trainwright.trainer.passing import pass_over
from trainwright.trainer.phase import Phase
from trainwright.trainer.resume import Resumption
from trainwright.trainer.saving import check_state, open_epoch, save_waiting
from trainwright.trainer.stop import EvaluationAbandoned
from trainwright.trainer.training_run import TrainingRun
from trainwright.trainer.validation import step_followers, validate, validation_is_due


def fit(run: TrainingRun, resumption: Resumption | None) -> None:
    """Train until the run's limits are reached; `run.state` says where to begin. Collective.

    `resumption` is that of a run that resumes; None in a fresh run.
    """
    state, hooks, stop, logbook = run.state, run.hooks, run.stop, run.logbook
    if run.validation is not None:
        run.validation.draw_from(rng_state())
        if resumption is None:
            sanity_check(run.validation)
    run.data.load()
    if run.settings.limit_train_batches == 0:
        return
    run.data.seek(run.trained.resume_source)
    if resumption is not None:
        run.data.warn_of_iterators()
        resumption.begin()
    if stop.number:  # it came in the sanity check
        stop.commit()
        return
    warn_of_open_end(run.settings, run.callbacks)
    logbook.start(run.module)
    hooks.call("on_train_start")  # it draws what it drew in the run's first start
    if resumption is not None:
        resumption.generators()
    check_state(run)
    stop.agree()
    # A validation that was abandoned has saved the run, so only the fit's end is left.
    with suppress(EvaluationAbandoned):
        while not run.is_done:
            fit_epoch(run)
            run.data.leave()
            if not state.epoch_ended:
                break
            state.next_epoch()
    run.engine.strategy.check_gradients(partial(run.engine.ranks.exchange, call="the end of the fit"))
    run.set_waiting_generators()  # nothing was left to train
    stop.finish()
    if not stop.number:
        hooks.call("on_before_train_end", partial(pass_over, run))
    logbook.stop_collecting()
    hooks.call("on_train_end")


def begin_epoch(run: TrainingRun) -> None:
    """Do what comes before the first batch of an epoch, or of the rest of an epoch. Collective."""
    run.state.begin_epoch(rng_state())
    if run.data.is_to_reload:
        run.data.reload()
        if run.validation is not None:
            run.validation.renew(rng_state())
    run.data.seek(run.trained.resume_source)
    run.hooks.call("on_train_epoch_start")
    run.replace_schedulers()
    run.set_waiting_generators()
    run.logbook.resume_epoch()
    run.begin_windows()
    # After the hooks of the epoch's start, which may freeze or unfreeze layers.
    run.engine.refresh_trainable()
    run.watch_backwards()
    run.engine.sync_gradients(True)
    if run.settings.fused_optimizers:
        for optimizer in run.trained.optimizers:
            use_fused(optimizer, [run.module])  # a hook may have added groups


def fit_epoch(run: TrainingRun) -> None:
    """Train one epoch, or the rest of it. Collective."""
    state, hooks, logbook, window, progress = run.state, run.hooks, run.logbook, run.window, run.progress
    collector = logbook.collector or logbook.start(run.module)
    begin_epoch(run)
    batch_start, batch_end = hooks["on_train_batch_start"], hooks["on_train_batch_end"]
    stop, stop_point, may_end = run.stop, run.stop.point, run.settings.max_steps != -1
    assert stop_point is not None
    log_every, validates_within = run.settings.log_every, run.validates_within
    batches, is_last = run.batches()
    if validates_within and state.batch and not is_last and validation_is_due(run):
        validate(run, within=True)  # the checkpoint was saved before it
    stop.agree()
    is_stopped = stop.is_due(window.is_open)  # before it has begun
    for batch, is_last in () if is_stopped else batches:
        progress.begin_batch(is_last, state.total_batches, state.step)
        collector.begin_batch(batch)
        index = state.batch
        if index in run.data.uneven:
            run.begin_uneven_round(index)
        unchecked = state.unchecked_batches if window.is_open else 0
        begun = None if run.pulls else batch
        if batch_start and batch is not None and -1 in hooks.call("on_train_batch_start", begun, index):
            is_last = agree_to_leave(run)
            break
        steps_before, skipped_before = state.step, state.skipped_steps
        outputs = train_batch(run, batch, index, is_last)
        if run.pulls:
            batch, is_last, index = batch.latest, batch.is_at_end, batch.count - 1
        stepped = state.step != steps_before
        state.end_batch(index, unchecked, stepped)
        if run.follows_by_step and state.step - steps_before > state.skipped_steps - skipped_before:
            step_followers(run, is_last)
        if stepped and log_every and state.batches_that_stepped % log_every == 0:
            logbook.owe_row()
        if run.uneven_round is not None:
            run.uneven_round.renew()
        if batch_end:
            given = read_outputs(outputs) if hooks.outputs_are_read else {}
            hooks.call("on_train_batch_end", given, batch, index)
        progress.enter(Phase.BETWEEN_BATCHES)
        if run.uneven_round is not None:
            run.end_uneven_round()
        if logbook.owes_row:
            logbook.log_step()
        if run.waiting_saves and not window.is_open:
            save_waiting(run)
        if validates_within and not is_last and not window.is_open and validation_is_due(run):
            validate(run, within=True)
        if (
            (stepped or run.is_manual)
            and (may_end or stop_point.is_pending or stop.requested)
            and stop.is_due(window.is_open)
        ):
            break
    else:
        refuse_short_epoch(run, is_last or is_stopped)
        is_last = is_last or (run.data.num_batches is None and not is_stopped)  # no length: it is over
    collector.end_batches()
    progress.enter(Phase.BETWEEN_BATCHES)
    if not stop.number:  # after a signal the resumed run does the rest of the epoch
        finish_epoch(run, is_complete=is_last)


def finish_epoch(run: TrainingRun, is_complete: bool) -> None:
    """End an epoch, or leave it because the run stops within it, and let callbacks score and save it. Collective."""
    refuse_empty_epoch(run)
    if run.is_manual:
        hold_over_end(run)
    if not is_complete:
        leave_epoch(run)
    with run.progress.during(Phase.EPOCH_END if is_complete else Phase.EPOCH_LEFT):
        close_epoch(run, is_complete)
    run.hooks.call_late()
    if is_complete:
        run.hooks.call("on_save_point")
    save_waiting(run)  # with what early stopping has made of the epoch
    run.stop.agree()
    run.logbook.flush()


def leave_epoch(run: TrainingRun) -> None:
    """Save a run that stops within an epoch as its latest batch has left it. Collective.

    A run that resumes there trains on as if this one had not stopped. The same command, with nothing left to train, calls
    on_train_epoch_end again, so nothing that this hook changes may be in the checkpoint.
    """
    run.state.leave_epoch(open_epoch(run))
    run.logbook.reduce(run.module)  # the score of a checkpoint may be a metric of this epoch
    run.hooks.call("on_train_epoch_stop")
    run.hooks.call("on_save_point")
    if run.choice.is_rerunnable:
        run.stop.save_end()


def close_epoch(run: TrainingRun, is_complete: bool) -> None:
    """Step the epoch-wise schedulers, validate if due, call on_train_epoch_end and reduce the metrics. Collective."""
    state, hooks, logbook = run.state, run.hooks, run.logbook
    if state.batches_that_stepped < run.settings.log_every and not state.schedulers_stepped:
        # A short run has rows too. A save after the whole epoch counts this one, a save of a run that stops within it does not.
        logbook.log_step()
    # Not again in a run that was saved in this epoch's validation and resumes here.
    if is_complete and not state.schedulers_stepped:
        step_schedulers(run, "epoch", state.epoch + 1, plateau=False)
        state.note_schedulers_stepped()
    if is_complete and validation_is_due(run, at_end=True):
        validate(run, within=False)
    if "on_train_epoch_end" in hooks.reduced_early:
        logbook.reduce(run.module)  # so that they see the epoch's values
    hooks.call("on_train_epoch_end")
    logbook.finish(run.module)
    if is_complete:
        # After the reduction that gives the metrics which these follow.
        step_schedulers(run, "epoch", state.epoch + 1, plateau=True)
    state.end_epoch(is_complete)


def train_batch(run: TrainingRun, batch: Any, index: int, is_last: bool) -> Any:
    """Run one batch through training_step, backward and, at its window's end, the optimizer; return its outputs."""
    engine, optimizer, window = run.engine, run.optimizer, run.window
    arguments = (batch, index) if run.takes_index else (batch,)
    if run.is_manual:
        return (
            skip_none(engine.world_size, "training")
            if batch is None
            else engine.run(run.module, "training_step", *arguments)
        )
    if run.accumulate > 1:
        length = run.data.num_batches
        window.begin_batch(run.accumulate, None if length is None else length - index, is_last)
        engine.sync_gradients(window.is_at_end)
    if window.is_at_start and run.clears_plainly and optimizer is not None:
        clear_gradients(optimizer)  # before the forward, which then has this memory
    outputs = skip_none(engine.world_size) if batch is None else engine.run(run.module, "training_step", *arguments)
    if window.is_at_start and not run.clears_plainly:
        begin_window(run, index)
    weight = run.weight if run.data.uneven else 1.0
    loss = outputs if type(outputs) is Tensor else read_loss(outputs, engine.world_size)
    if loss is None:
        count_empty(run)
    elif optimizer is not None:
        backward(run, loss, weight)
    if run.uneven_round is not None:
        # Before the step, whose changes stay on a rank without a sample too.
        run.uneven_round.put_back()
    # A window whose batches all returned None has nothing to step with.
    if window.is_at_end and (loss is not None or window.has_gradients or optimizer is None):
        step(run, optimizer, arguments, loss, weight)
    if run.accumulate > 1:
        window.end_batch()
    return outputs


def agree_to_leave(run: TrainingRun) -> bool:
    """Meet the other ranks at the end of an epoch that a hook has ended, and return True (RuntimeError if one trains on)."""
    run.progress.leave_batch()
    run.engine.ranks.wait("the end of an epoch by -1 from on_train_batch_start")
    leave_window(run)
    return True


def refuse_short_epoch(run: TrainingRun, is_last: bool) -> None:
    """Refuse a loader that yielded no batches, or fewer than its length (RuntimeError)."""
    length = run.data.num_batches
    if length is None and run.state.batch == 0 and not is_last:
        raise RuntimeError(
            "the training loader yielded no batches (its dataset yields nothing, drop_last dropped all, or its __iter__ does "
            "not start again in a later epoch); give it data."
        )
    if length is not None and not is_last:
        raise RuntimeError(
            f"the training loader yielded {run.state.batch} batches, but its length is {length}; make the __len__ of its "
            "sampler the number of batches that it yields."
        )
