"""The end of an epoch or of a fit: schedulers, validations (also within an epoch), and a last pass over the training data."""

from __future__ import annotations

from itertools import islice

import torch

from trainwright.data.seeding import isolate_rng
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.epoch_batches import Batch
from trainwright.trainer.evaluate import evaluate
from trainwright.trainer.optimization import step_schedulers
from trainwright.trainer.run_position import CHECKPOINT, VALIDATION, Phase
from trainwright.trainer.sources import limited
from trainwright.trainer.training_run import TrainingRun
from trainwright.trainer.uneven_round import discarded


def close_epoch(run: TrainingRun, is_complete: bool) -> None:
    """Step the epoch-wise schedulers, validate if due, call on_train_epoch_end and reduce the metrics. Collective."""
    state, hooks, logbook = run.state, run.hooks, run.logbook
    if state.batches_that_stepped < run.plan.log_every and not state.schedulers_stepped:
        # A short run has rows too. A save after the whole epoch counts this one, a save of a run that stops within it does not.
        logbook.log_step()
    # Not again in a run that was saved in this epoch's validation and resumes here.
    if is_complete and state.claim_epoch_schedulers():
        step_schedulers(run, "epoch", state.epoch + 1, plateau=False)
    if is_complete and validation_is_due(run, at_end=True):
        validate(run, within=False)
    if "on_train_epoch_end" in hooks.reduced_early:
        logbook.reduce()  # so that they see the epoch's values
    hooks.call("on_train_epoch_end")
    logbook.finish()
    if is_complete:
        # After the reduction that gives the metrics which these follow.
        step_schedulers(run, "epoch", state.epoch + 1, plateau=True)


def validation_is_due(run: TrainingRun, at_end: bool = False) -> bool:
    """Return whether a validation is due after the current batch, or `at_end` of an epoch.

    The loop does not check within an accumulation window. A validation that falls due there is due at the window's end. So it
    scores weights that a checkpoint can store and a run can resume from.
    """
    settings, state = run.settings, run.state
    every = settings.check_val_every_n_epoch
    # Once after a batch: an interval may end with the epoch, and a resumed run may have validated before its save.
    if run.validation is None or state.validated_at == state.total_batches:
        return False
    if every is not None and (state.epoch + 1) % every:
        return False
    if run.plan.validation_clock is not None:
        return not at_end and run.plan.validation_clock.is_due(state.step)
    if run.data.validate_every is None:
        return at_end
    count = state.total_batches if every is None else state.batch
    # Whether an interval ended in the batches since the latest check, of which a window makes several.
    has_passed = count // run.data.validate_every > max(0, count - state.unchecked_batches) // run.data.validate_every
    return has_passed or (at_end and run.data.num_batches is None and every is not None)


def validate(run: TrainingRun, within: bool) -> None:
    """Run a validation, `within` the epoch or at its end, and step the schedulers that follow validations. Collective."""
    assert run.validation is not None
    state = run.state
    if run.optimizer is not None:
        run.plan.overrides.get("on_validation_model_zero_grad", run.optimizer.zero_grad)()

    def count() -> None:
        state.count_validation()
        step_schedulers(run, "validation", state.validations, plateau=False)
        step_schedulers(run, "validation", state.validations, plateau=True)
        if state.schedulers_wait:
            state.postpone_schedulers(False)
            step_schedulers(run, "step", state.step, plateau=True)

    state.mark_rng(VALIDATION)
    try:
        evaluate(run.validation, Phase.VALIDATION_WITHIN if within else Phase.VALIDATION_AT_END, before_end=count)
    except BaseException:
        state.rng[CHECKPOINT] = state.rng[
            VALIDATION
        ]  # a run resumed from a save on this error repeats the whole validation
        raise
    if within:  # an epoch's end asks for itself
        run.stop.agree()


def validate_within(run: TrainingRun, batch: Batch) -> None:
    """Validate, if an interval within the epoch has passed. Collective."""
    if not batch.is_last and not run.window.is_open and validation_is_due(run):
        validate(run, within=True)


def validates_within(run: TrainingRun) -> bool:
    has_interval = run.data.validate_every is not None or run.plan.validation_clock is not None
    return run.validation is not None and has_interval


def follows_metric_by_step(run: TrainingRun) -> bool:
    return any(config.interval == "step" and config.reduce_on_plateau for config in run.trained.schedulers)


def step_plateau_schedulers(run: TrainingRun, is_last: bool) -> None:
    """Step the step-wise schedulers that follow a metric, or let them wait for the validation that is due now. Collective.

    The validation may log their metric, and a checkpoint that it leads to stores their step. A step that the loss scale skipped
    does not count.
    """
    is_timed = run.plan.validation_clock is not None  # such a validation is due on no batch that is known here
    is_due = not is_timed and validation_is_due(run, at_end=is_last)
    if run.state.has_made_step and not run.state.postpone_schedulers(is_due):
        step_schedulers(run, "step", run.state.step, plateau=True)


def pass_over(run: TrainingRun) -> bool:
    """Run training_step on each batch of an epoch, in training mode, without gradients, hooks or logging. Collective.

    The ranks together have the batches of one process. The run's random numbers, its position in the data and its metrics
    stay as they are. It returns False, with a warning, if the loop cannot give the batches again.
    """
    engine, module = run.engine, run.module
    collector = run.logbook.collector or run.logbook.start(module)
    with isolate_rng(), torch.no_grad(), discarded(module, collector):
        loader = run.data.again()
        # Where loaders end at different batches, a rank would wait in the forward for one that has ended.
        if not loader.ends_together:
            rank_zero_warn(
                "no pass over the training data is made at the end, because loaders of unknown length are each rank's own: "
                "batch-norm statistics stay as training has left them."
            )
            return False
        try:
            for index, batch in enumerate(islice(loader, limited(loader.length, run.settings.limit_train_batches))):
                is_dummy = loader.real_length is not None and index >= loader.real_length
                # A dummy batch runs for the other ranks' collectives, and must not count in batch-norm statistics.
                buffers = [(each, each.clone()) for each in module.buffers()] if is_dummy else []
                collector.begin_batch(batch, index)
                if run.plan.transfer is not None:
                    batch = run.plan.transfer(batch)
                engine.run(module, "training_step", *(batch, index)[: run.plan.num_arguments])
                for buffer, kept in buffers:
                    buffer.copy_(kept)
            collector.begin_loader(None)
        finally:
            loader.close()
    return True
