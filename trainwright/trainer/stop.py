"""Stop: whether a fit stops here, and how it ends after a signal (SIGTERM, SIGUSR1, Ctrl-C).

    a rank is signalled       SignalWatch records it and calls Stop, whose sync points notify all ranks.
    in training               Stop.is_due ends the loop of every rank at one optimizer step, once they know the signal.
    in a validation           Stop.after_loader: all ranks leave it, and the run is saved as it was before.
    the loop has ended        Stop.finish > ModelCheckpoint.save_stop > Trainer.save_checkpoint > saving.py (the contents).
    after fit's cleanup       rank 0 prints it and has SLURM requeue the job on SIGUSR1, and all ranks raise RunStopped.

A signal changes nothing for a run that is ending anyway, by max_steps or by should_stop.
"""

from __future__ import annotations

import signal
from types import TracebackType
from typing import Any

from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.data.seeding import isolate_rng
from trainwright.distributed.environment import requeue_job
from trainwright.distributed.signals import TWICE_SECONDS, SignalWatch, exit_code, is_interactive
from trainwright.distributed.sync_points import SyncPoint
from trainwright.engine.engine import Engine
from trainwright.errors import RunStopped
from trainwright.faults.exit_signals import end_watch
from trainwright.rank_zero import say
from trainwright.trainer.run_position import Position
from trainwright.trainer.settings import Settings


class EvaluationAbandoned(Exception):
    """Ends an evaluation of fit on every rank, because the run stops. A resumed run repeats the evaluation."""


class Stop:
    """The stop of one fit: by max_steps, because a rank has set `requested`, or by a signal.

    The loop asks it after every batch that stepped, and after every batch of manual optimization. Entered around the fit, it
    raises RunStopped at the end of a fit that a signal has stopped. `trainer` has the ModelCheckpoints that save the run. If
    `is_rerunnable`, the same command may be repeated, and is then to find the run's end.
    """

    def __init__(
        self, engine: Engine, settings: Settings, state: Position, trainer: Any, *, is_rerunnable: bool = False
    ) -> None:
        self.requested = False
        """The value of `trainer.should_stop`."""
        self.is_agreed = False
        """Whether every rank knows of the request."""
        self.number = 0
        """The signal that stops the run, the same on every rank. 0 for none."""
        self.path = ""
        """The checkpoint of the stopped run. "" for none."""
        self.interrupted = False
        """Whether Ctrl-C, or a KeyboardInterrupt or SystemExit that a hook raised, has ended the latest run."""
        self.was_cut = False
        """Whether an exception of any kind, or a signal, has ended the latest run."""
        self._engine, self._settings, self._state, self._trainer = engine, settings, state, trainer
        self._watch = SignalWatch(self._on_signal, TWICE_SECONDS / (2 if engine.world_size == 1 else 1))
        self.point: SyncPoint | None = None
        """The sync point at which all ranks stop training. None outside of fit."""
        self._abandonment: SyncPoint | None = None
        """The sync point at which all ranks leave a validation before one batch."""
        self._is_rerunnable = is_rerunnable

    @property
    def received(self) -> int:
        """Return the first signal that this rank knows of, 0 for none."""
        return self.number or self._watch.first

    def __enter__(self) -> Stop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.point = self._abandonment = None
        if self.number and error is None:
            self._announce()  # while a second signal can still interrupt it
            # Ctrl-C in a session ends what runs there; RunStopped, a SystemExit, would end the session.
            if not (self.number == signal.SIGINT and is_interactive()):
                raise end_watch(self._watch, RunStopped(self._code))
        self._watch.close()
        if not self.number:
            self._watch.deliver()  # from here on the handlers from before the fit get it
        elif error is None:
            raise KeyboardInterrupt

    def open(self) -> None:
        """Listen for requests and signals from here on. Collective: call on every rank."""
        self.point = self._engine.connection.sync_point("stop")
        self._abandonment = self._engine.connection.sync_point("abandonment")
        # Not once the run stops at a step: its end may take long.
        self._engine.hangs.end_after(lambda: [] if self.number or self.point is None else self._watch.terms)
        self._watch.open()

    def note_end(self, error: BaseException | None) -> None:
        """Record how a run has ended. None when another begins."""
        self.was_cut = error is not None
        self.interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))

    def request(self, wanted: bool) -> None:
        """Request that the run ends, as `trainer.should_stop = True` does, or withdraw that."""
        self.requested = wanted

    def request_soon(self) -> None:
        """Stop all ranks at one optimizer step. Callable on any rank and from any thread (RuntimeError outside fit)."""
        if self.point is None:
            raise RuntimeError("stop_soon works in trainer.fit only.")
        self.point.request()

    def _on_signal(self) -> None:
        """Notify all ranks of this rank's signal, in any thread."""
        for point in (self.point, self._abandonment):
            if point is not None:
                point.request()

    def is_due(self) -> bool:
        """Return, the same on every rank, whether the run ends at this optimizer step. Call it at every step on every rank."""
        settings, state = self._settings, self._state
        if -1 < settings.max_steps <= state.step:
            return True
        if state.progress.is_within_window:  # no checkpoint within an epoch has gradients
            return False
        assert self.point is not None
        if self.point.is_reached(state.step):
            # The point serves both: without a signal, some rank has set should_stop or called stop_soon.
            if not self.agree_on_signal():
                self.requested = self.is_agreed = True
        elif self.requested and not self._is_requested:
            self.point.request()  # perhaps only this rank has set it
        if self.number or not self.requested:
            return self.number != 0
        is_long_enough = state.epoch >= (settings.min_epochs or 0) and state.step >= (settings.min_steps or 0)
        return self._is_requested and is_long_enough

    def is_due_after(self, has_stepped: bool) -> bool:
        """Return whether the run ends after a batch: `is_due`, if there is any reason to look."""
        assert self.point is not None
        may_end = self._settings.max_steps != -1 or self.point.is_pending or self.requested
        return has_stepped and may_end and self.is_due()

    @property
    def _is_requested(self) -> bool:
        return self.requested and (self.is_agreed or self._engine.world_size == 1)

    def agree(self) -> None:
        """Stop every rank here if one of them is to stop. Collective: call on every rank."""
        if self._engine.world_size > 1 and not self.is_agreed:
            wishes = self._engine.ranks.exchange(bool(self.requested), "the agreement on a stop")
            self.requested = self.is_agreed = any(wishes)

    def agree_on_signal(self) -> bool:
        """Return whether a signal that any rank knows of stops the run here. Collective: call on every rank."""
        if not self.number:
            numbers = self._engine.ranks.exchange(int(self._watch.first), "the agreement on a signal")
            self.number = next(filter(None, numbers), 0)
            self.was_cut, self.interrupted = bool(self.number), self.number == signal.SIGINT
        return bool(self.number)

    @property
    def _ends_by_itself(self) -> bool:
        """Return whether the run ends here without a signal, and a resumed run would not train on."""
        return -1 < self._settings.max_steps <= self._state.step or self._is_requested

    @property
    def _may_abandon(self) -> bool:
        """Return whether a signal abandons an evaluation.

        Not within an accumulation window: no checkpoint has its gradients, and its end changes the weights.
        """
        return not self._state.progress.is_within_window and not self._ends_by_itself

    def is_left(self, loader: int, batch: int) -> bool:
        """Return whether all ranks abandon the running evaluation before this batch."""
        point = self._abandonment
        if point is None or not point.is_pending or not self._may_abandon:
            return False
        # Sync points compare numbers, so the numbers of batches grow over all evaluations of the fit.
        return point.is_reached((self._state.total_batches << 64) + (loader << 48) + batch)

    def after_loader(self) -> None:
        """Abandon the evaluation on every rank if one of them has left it or knows of a signal. Collective.

        Must run before the first collective of the evaluation's end, which ranks that left early never reach.
        """
        if self._abandonment is not None and self._may_abandon and self.agree_on_signal():
            self._state.progress.end_batches(is_stopped=True)
            raise EvaluationAbandoned

    def finish(self) -> None:
        """Save if a signal has ended the loop, or has arrived since. Collective: call on every rank."""
        if (self.number or not self._ends_by_itself) and self.agree_on_signal():
            self.save()

    def save(self) -> None:
        """Save the stopped run. Collective: call on every rank."""
        with isolate_rng():
            if (checkpoint := self._checkpoint) is not None:
                self.path = checkpoint.save_stop(self._trainer)

    def save_end(self) -> None:
        """Save a rerunnable run that ended by itself, so that the same command finds nothing left to train. Collective."""
        checkpoint, has_trained = self._checkpoint, self._settings.limit_train_batches != 0
        if self._is_rerunnable and not self.number and has_trained and checkpoint is not None:
            checkpoint.save_stop(self._trainer, "end")

    @property
    def _checkpoint(self) -> ModelCheckpoint | None:
        """Return the first ModelCheckpoint that keeps any checkpoint: another would save the same state again."""
        checkpoints: list[ModelCheckpoint] = self._trainer.checkpoint_callbacks
        return next((checkpoint for checkpoint in checkpoints if checkpoint.keeps_any), None)

    @property
    def _code(self) -> int:
        return exit_code(self.number, bool(self.path))

    def _announce(self) -> None:
        self._engine.connection.announce_stop(self._code)
        if self._engine.rank:
            return
        name = signal.Signals(self.number).name
        what = "Ctrl-C" if self.number == signal.SIGINT else name
        text = f"trainwright: {what} has stopped the run in epoch {self._state.epoch}, at step {self._state.step}"
        if self.path:
            text += f'; it is saved as {self.path}. Run the same command with ckpt_path="auto" to resume.'
        elif self._checkpoint is not None:
            text += "; nothing was saved, since its weights or its optimizer's state are not finite."
        else:
            text += "; nothing was saved, since this run has no ModelCheckpoint that saves."
        if self.path and name == "SIGUSR1" and (requeued := requeue_job()):
            text += f"\ntrainwright: {requeued}"
        say(text)
