"""Validation: when a fit validates, and what it does around that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainwright.data.seeding import rng_state
from trainwright.trainer.evaluate import evaluate
from trainwright.trainer.optimization import step_schedulers
from trainwright.trainer.phase import Phase
from trainwright.trainer.stop import EvaluationAbandoned
from trainwright.trainer.training_run import TrainingRun


def validation_is_due(run: TrainingRun, at_end: bool = False) -> bool:
    """Return whether a validation is due after the current batch, or `at_end` of an epoch.

    The loop does not check within an accumulation window: what falls due there is due at the window's end, so that a
    validation scores weights that a checkpoint can hold and a run can resume from.
    """
    settings, state = run.settings, run.state
    every = settings.check_val_every_n_epoch
    # Once after a batch: an interval may end with the epoch, and a resumed run may have validated before its save.
    if run.validation is None or state.validated_at == state.total_batches:
        return False
    if every is not None and (state.epoch + 1) % every:
        return False
    if run.validation_clock is not None:
        return not at_end and run.validation_clock.is_due(state.step)
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
        run.own.get("on_validation_model_zero_grad", run.optimizer.zero_grad)()

    def count() -> None:
        state.count_validation()
        step_schedulers(run, "validation", state.validations, plateau=False)
        step_schedulers(run, "validation", state.validations, plateau=True)
        if state.schedulers_wait:
            state.let_schedulers_wait(False)
            step_schedulers(run, "step", state.step, plateau=True)

    with abandonable(run):
        evaluate(run.validation, Phase.VALIDATION_WITHIN if within else Phase.VALIDATION_AT_END, before_end=count)
    if within:  # an epoch's end asks for itself
        run.stop.agree()


def step_followers(run: TrainingRun, is_last: bool) -> None:
    """Step the step-wise schedulers that follow a metric, or let them wait for the validation that is due now. Collective.

    Its metric may be theirs, and a checkpoint that it leads to holds their step. A step that the loss scale skipped does not
    count.
    """
    is_timed = run.validation_clock is not None  # such a validation is due on no batch that is known here
    if not is_timed and validation_is_due(run, at_end=is_last):
        run.state.let_schedulers_wait(True)
    else:
        step_schedulers(run, "step", run.state.step, plateau=True)


@contextmanager
def abandonable(run: TrainingRun) -> Iterator[None]:
    """Run a validation in the block; if it fails or is abandoned, the run is saved as it was before. Collective.

    Raises:
        EvaluationAbandoned: it was.
    """
    stop, logbook, generators = run.stop, run.logbook, rng_state()
    latest = logbook.state_dict() if stop.may_abandon(run.window.is_open) else None
    try:
        yield
    except EvaluationAbandoned:
        assert latest is not None
        logbook.drop_evaluation(latest)
        run.progress.enter(Phase.STOPPED)  # the epoch-wise schedulers that have stepped are noted in the state
        stop.commit(generators)
        logbook.end_evaluation()
        raise
    except BaseException:
        run.state.load_generators(generators)  # a run resumed from a save on this error repeats the whole validation
        raise
