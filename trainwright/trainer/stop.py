"""Stop: what becomes of a fit that a signal (SIGTERM, SIGUSR1, Ctrl-C) has asked to stop, from the first note to the exit.

    a rank is signalled       SignalWatch notes it and requests two sync points, which the watchers pass to all ranks
    in training               "stop": all ranks leave at one optimizer step
    in a validation           "abandonment": all leave it, and what is saved is the run as it was before it
    there                     the ranks tell each other the signal, and ModelCheckpoint saves once
    fit has ended, all closed  rank 0 says so, asks SLURM to requeue on SIGUSR1, and each rank raises RunStopped

A run that has come to its own end, by its limits or by should_stop, ends as it would have.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trainwright.data.seeding import isolate_rng, rng_state, set_rng_state
from trainwright.distributed.environment import requeue_job
from trainwright.distributed.signals import SignalWatch, exit_code, is_interactive
from trainwright.distributed.sync_points import SyncPoint
from trainwright.errors import RunStopped
from trainwright.trainer.phase import Phase

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer
    from trainwright.trainer.training_run import TrainingRun


class EvaluationAbandoned(Exception):
    """Ends an evaluation of fit on every rank, because the run is to stop; the run goes on from before it."""


class SignalStop:
    """One fit's stop on a signal. Entered around the fit, it raises RunStopped at the end where there was one.

    Args:
        trainer: whose fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.number = 0
        """The signal that stops the run, alike on every rank; 0 for none."""
        self.path = ""
        """The checkpoint that the stopped run has saved; "" for none."""
        self.abandonment: SyncPoint | None = None
        self._trainer = trainer
        self._watch = SignalWatch(self._ask)
        self._asked: list[SyncPoint] = []
        self._is_committed = False
        self._evaluations = 0

    @property
    def received(self) -> int:
        """Return the first signal that this rank knows of; 0 for none."""
        return self.number or self._watch.first

    def __enter__(self) -> SignalStop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.number and error is None:
            self._announce()  # while a repeated signal is still heard
        self._watch.close()
        if not self.number:
            self._watch.deliver()
        elif error is None:
            if self.number == signal.SIGINT and is_interactive():
                raise KeyboardInterrupt
            raise RunStopped(self._code)

    def watch(self) -> None:
        """Heed signals from here on. Collective: call on every rank."""
        self.abandonment = self._trainer.sync_point("abandonment")
        assert self._trainer.stop_point is not None
        self._asked = [self._trainer.stop_point, self.abandonment]
        self._watch.open()

    def _ask(self) -> None:
        for each in self._asked:
            each.request()

    # -- how the ranks agree -----------------------------------------------------------------------------------------

    def agree(self) -> bool:
        """Return whether a signal stops the run here, known to any rank. Collective: call on every rank."""
        if not self.number:
            numbers = self._trainer.engine.ranks.exchange(int(self._watch.first), "the agreement on a signal")
            self.number = next(filter(None, numbers), 0)
            self._trainer.interrupted = self.number == signal.SIGINT
        return bool(self.number)

    def begin_evaluation(self) -> SyncPoint | None:
        """Return what the evaluation that begins has to look at before each batch; None where it is not to be abandoned."""
        self._evaluations += 1
        return self.abandonment if may_abandon(self._trainer) else None

    def is_left(self, loader: int, batch: int) -> bool:
        """Return whether the running evaluation is abandoned before this batch, on every rank before the same."""
        assert self.abandonment is not None
        return self.abandonment.is_reached((self._evaluations << 64) + (loader << 48) + batch)

    def after_loader(self) -> None:
        """Abandon the evaluation on every rank if one of them has left it, or knows of a signal. Collective.

        It stands before the first collective of an evaluation's end, which those that have left would not come to.
        """
        if self.agree():
            raise EvaluationAbandoned

    # -- what is saved -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Save where the loop has ended by a signal, or one has come since. Collective: call on every rank."""
        if (self.number or not ends_by_itself(self._trainer)) and self.agree():
            self.commit()

    def commit(self, generators: dict[str, Any] | None = None) -> None:
        """Save the run as it stands, with these generators where given, once. Collective: call on every rank."""
        callback = self._trainer.checkpoint_callback
        if self._is_committed or callback is None:
            return
        self._is_committed = True
        with isolate_rng():
            if generators is not None:
                set_rng_state(generators)
            self.path = callback.save_stop(self._trainer)

    # -- what is said ------------------------------------------------------------------------------------------------

    @property
    def _code(self) -> int:
        return exit_code(self.number, bool(self.path))

    def _reason(self) -> str:
        callback = self._trainer.checkpoint_callback
        if callback is None or not callback.keeps_any:
            return "this run has no ModelCheckpoint that saves"
        return "the weights are not finite"

    def _announce(self) -> None:
        """Tell the launcher and the user."""
        trainer = self._trainer
        trainer.engine.connection.announce_stop(self._code)
        if not trainer.is_global_zero:
            return
        name = signal.Signals(self.number).name
        what = "Ctrl-C" if self.number == signal.SIGINT else name
        where = (
            f"trainwright: {what} has stopped the run in epoch {trainer.current_epoch}, at step {trainer.global_step}"
        )
        if self.path:
            said = f'{where}; it is saved as {self.path}. The same command with ckpt_path="auto" goes on from there.'
        else:
            said = f"{where}; nothing was saved, since {self._reason()}."
        if self.path and name == "SIGUSR1" and (requeued := requeue_job()):
            said = f"{said}\ntrainwright: {requeued}"
        print(said, file=sys.stderr, flush=True)


def save_end(trainer: Trainer) -> None:
    """Save a run that has come to its end, unless it is, so that the same command finds nothing left to do. Collective."""
    callback = trainer.checkpoint_callback
    if callback is not None and not trainer.signal_stop.number and trainer.settings.limit_train_batches != 0:
        callback.save_stop(trainer, "end")


def ends_by_itself(trainer: Trainer) -> bool:
    """Return, alike on every rank, whether the run ends here without a signal, so that a resumed one would do no more."""
    is_at_limit = -1 < trainer.max_steps <= trainer.global_step
    return is_at_limit or (trainer.should_stop and (trainer.stop_is_agreed or trainer.world_size == 1))


def may_abandon(trainer: Trainer) -> bool:
    """Return, alike on every rank, whether an evaluation that begins now is left when a signal comes.

    Not within an accumulation window: its gradients are in no checkpoint, and once it has ended the weights are others.
    """
    return trainer.stage == "fit" and not trainer.is_within_window and not ends_by_itself(trainer)


@contextmanager
def abandonable(run: TrainingRun) -> Iterator[None]:
    """Run a validation in the block; where it is abandoned, the run is saved as it stands here. Collective.

    Raises:
        EvaluationAbandoned: it was.
    """
    trainer, stop, logbook = run.trainer, run.trainer.signal_stop, run.trainer.logbook
    kept = (rng_state(), logbook.state_dict()) if may_abandon(trainer) else None
    try:
        yield
    except EvaluationAbandoned:
        assert kept is not None
        generators, latest = kept
        logbook.forget_evaluation(latest)
        run.progress.enter(Phase.STOPPED)  # the epoch-wise schedulers that have stepped are noted in the state
        stop.commit(generators)
        logbook.end_evaluation()
        raise
