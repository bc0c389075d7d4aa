"""Resume: takes a fit to its loop, from a checkpoint if there is one. The engine loads model, optimizers and precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from trainwright.callbacks.base import Callback
from trainwright.callbacks.checkpoint_policy import are_similar, monitor_of
from trainwright.callbacks.early_stopping import EarlyStopping
from trainwright.callbacks.timer import Timer
from trainwright.checkpoint.reader import StoredCheckpoint
from trainwright.data.seeding import isolate_rng, set_rng_state
from trainwright.engine.engine_checkpoints import OpenCheckpoint
from trainwright.engine.named_state import hold_gradients
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.evaluate import sanity_check
from trainwright.trainer.metrics import merged
from trainwright.trainer.run import Run
from trainwright.trainer.run_position import AFTER_EPOCH_START, CHECKPOINT, EPOCH_START, VALIDATION_LOADERS
from trainwright.trainer.saving import check_state, edit_with_hooks
from trainwright.trainer.settings import DEFAULT_MAX_EPOCHS, Settings
from trainwright.trainer.training_run import TrainingRun


class Resumption:
    """Takes a fit from its setup to its loop, and restores the run's state from a checkpoint if the call has one.

    `run` has all steps in their order, except two. Before the setup, Run.opened continues in the checkpoint's run folder.
    After the hooks of the first epoch's start, which draw the same random numbers as in the original run,
    TrainingRun.begin_batches restores the RNG state of the save and the metrics logged so far in the epoch.

    All methods are collective: call them on every rank.
    """

    def __init__(self, run: TrainingRun, checkpoint: StoredCheckpoint | None, fresh: tuple[str, ...]) -> None:
        self._run, self._checkpoint, self._fresh = run, checkpoint, fresh

    def run(self) -> bool:
        """Take all steps; return whether there is anything to train."""
        run, checkpoint = self._run, self._checkpoint
        if checkpoint is not None:
            # Before optimizers are made: a callback that changes the module or adds parameter groups does so again in
            # on_fit_start.
            opened, unused = self._load_parts(checkpoint)
        run.prepare(partial(roll_back, run))
        if checkpoint is not None:
            self._load_state(checkpoint, opened, unused)
        if run.validation is not None:
            run.state.mark_rng(VALIDATION_LOADERS)
            if checkpoint is None:
                sanity_check(run.validation)
        run.data.load()
        if run.settings.limit_train_batches == 0:
            return False
        run.data.seek(run.trained.resume_source)
        if checkpoint is not None:
            run.hooks.call("on_resume_start")  # callbacks that had stopped the run stop it again
            run.stop.agree()
            run.logbook.drop_later_rows()
        if run.stop.number:  # a signal came in the sanity check
            run.stop.save()
            return False
        warn_of_open_end(run.settings, run.trainer.callbacks)
        run.logbook.start(run.module)
        run.hooks.call("on_train_start")  # before the RNG is restored: it used random numbers in the original run too
        if checkpoint is not None:
            self._restore_rng()
        check_state(run)
        run.stop.agree()
        return True

    def _load_parts(self, checkpoint: StoredCheckpoint) -> tuple[OpenCheckpoint, list[str]]:
        """Load the state of callbacks and datamodule without a change of the RNG state.

        Return the opened checkpoint and the keys of the callback states that no callback has loaded.
        """
        run = self._run
        with isolate_rng():
            opened = run.engine.open(checkpoint, edit=edit_with_hooks(run, "on_load_checkpoint"))
            # A raw loop saves none. Only another ModelCheckpoint can miss the scores of one.
            unused = load_states(run.trainer.callbacks, opened.state.get("callbacks", {}))
            scores = bool(run.trainer.checkpoint_callbacks)
            restore_datamodule(run, opened.state)
        return opened, [key for key in unused if ", save_top_k=" not in key or (scores and monitor_of(key))]

    def _load_state(self, checkpoint: StoredCheckpoint, opened: OpenCheckpoint, unused: list[str]) -> None:
        """Load weights, optimizers, counters and the state of the parts (CheckpointError if it is damaged or another run's)."""
        run, path = self._run, checkpoint.path
        strict = run.module.strict_loading is not False
        check = partial(run.engine.script.check, path=path, fresh=self._fresh)
        restored = run.engine.load(opened, strict=strict, check=check, fresh=self._fresh)
        load = partial(run.hooks.call, "load_sharded_state_dict", checkpoint, opened.tensors)
        run.engine.ranks.run_on_all(load, "the load of a checkpoint")
        state, own = restored.state, restored.rank_state or {}
        position, gradients = state["position"], own.get("gradients", [])
        if position.get("holds_gradients") and not self._can_hold(checkpoint, gradients):
            position = {**position, "holds_gradients": False}
        run.state.resume(position, own.get("epoch_rng"), restored.rng)
        sources = restored.nearest_rank_state.get("sources") or [()]
        run.data.load_state_dict({"places": position.get("places", ()), "sources": sources[0]})
        if own.get("should_stop"):  # by the user's own code, which may not ask again
            run.stop.request(True)
            run.trainer.print(
                f"trainer.should_stop had been set when {path} was saved, so the run ends as it would have ended. To train on, "
                "set trainer.should_stop = False in on_train_start."
            )
        if run.state.holds_gradients:
            hold_gradients(run.engine.modules, gradients)
        run.engine.script.resume(state, path, self._fresh)
        if unused:
            rank_zero_warn(
                f"{path}: it has states that no callback loads, so this run continues without them: {', '.join(unused)}.",
                stacklevel=2,
            )
        for config in run.trained.schedulers if run.state.step else ():
            if (optimizer := getattr(config.scheduler, "optimizer", None)) is not None:
                optimizer._opt_called = True  # it stepped before this process began, and torch would warn of the order
        run.logbook.load_state_dict(state.get("metrics", {}), self._unfinished_metrics(checkpoint, own))
        last, epoch = run.settings.last_epoch, run.state.epoch
        if last is not None and epoch >= last:
            place = f"in epoch {epoch}" if run.state.batch else f"at the end of epoch {epoch - 1}"
            run.trainer.print(f"{path} was saved {place}, and max_epochs is {last}: nothing is left to train.")
        else:
            run.trainer.print(f"resuming from {path}: epoch {epoch}, batch {run.state.batch}, step {run.state.step}")

    def _restore_rng(self) -> None:
        """Let callbacks make the saves that the killed run missed, then rewind the RNG to the epoch's start."""
        run, state = self._run, self._run.state
        saved = state.rng.pop(CHECKPOINT, None)
        if saved is None:
            return
        with isolate_rng(), state.at_loaded_end():
            set_rng_state(saved)
            run.hooks.call("on_resume_end")
        set_rng_state(state.rng.get(EPOCH_START) or saved)
        if state.batch:
            state.rng[AFTER_EPOCH_START] = saved

    def _can_hold(self, checkpoint: StoredCheckpoint, gradients: Sequence[Mapping[str, Tensor]]) -> bool:
        """Return whether this job is like the job that saved these gradients. Warn if it differs."""
        engine = self._run.engine
        now = (engine.strategy.name, engine.world_size)
        is_alike = (checkpoint.header.get("strategy"), checkpoint.world_size) == now
        is_alike = is_alike and len(gradients) == len(engine.modules)
        if not is_alike:
            rank_zero_warn(
                f"{checkpoint.path} holds gradients that wait for a step. Another strategy or number of processes continues "
                "without them.",
                stacklevel=2,
            )
        return is_alike

    def _unfinished_metrics(self, checkpoint: StoredCheckpoint, own: dict[str, Any]) -> dict[str, Any] | None:
        """Return the epoch's logged values of this rank, or of other parts of the data a share of all parts' values."""
        engine = self._run.engine
        if checkpoint.num_data_ranks == engine.num_data_ranks:
            return own.get("metrics")
        # The values of each part go to exactly one part, or the epoch's sums would count them twice.
        parts = range(engine.data_rank, checkpoint.num_data_ranks, engine.num_data_ranks)
        states = [(checkpoint.rank_state(rank) or {}).get("metrics") for rank in map(checkpoint.first_rank, parts)]
        together, left_out = merged([each for each in states if each])
        if left_out:
            rank_zero_warn(
                f"{checkpoint.path} was saved within an epoch of data in {checkpoint.num_data_ranks} parts, and this run has "
                f"{engine.num_data_ranks}: for this epoch the metric objects {', '.join(left_out)} cover only the batches "
                "after the resume.",
                stacklevel=2,
            )
        return together


def roll_back(run: TrainingRun) -> str:
    """Load the state of the newest checkpoint, except the position, and return its path, or "" if there is none. Collective."""
    saving = [each.last_model_path for each in run.trainer.checkpoint_callbacks if not each.save_weights_only]
    path = next(filter(None, saving), run.trained.resume_source or "")
    if path:
        opened = run.engine.open(path, edit=edit_with_hooks(run, "on_load_checkpoint"))
        restored = run.engine.load(opened)
        run.hooks.call("load_sharded_state_dict", opened.checkpoint, opened.tensors)
        run.engine.script.resume(restored.state, path, ())
        if restored.rng is not None:
            set_rng_state(restored.rng)
    return path


def load_states(callbacks: Sequence[Callback], states: Mapping[str, Any]) -> list[str]:
    """Load the states of callbacks, of a ModelCheckpoint also under a similar key; return the keys of the unused states."""
    unused, keys = dict(states), [callback.state_key for callback in callbacks]
    for callback, key in zip(callbacks, keys, strict=True):
        similar = (other for other in unused if other not in keys and are_similar(key, other))
        if (stored := key if key in unused else next(similar, None)) is not None:
            callback.load_state_dict(unused.pop(stored))
    return list(unused)


def restore_datamodule(run: Run, state: dict[str, Any]) -> None:
    """Load the datamodule's state, if there is any."""
    if run.datamodule is not None and "datamodule" in state:
        run.datamodule.load_state_dict(state["datamodule"])


def warn_of_open_end(settings: Settings, callbacks: list[Callback]) -> None:
    """Warn of a fit that ends after a number of epochs that its user has not chosen."""
    is_open = settings.max_epochs is None and settings.max_steps == -1 and settings.max_time is None
    if is_open and not any(isinstance(each, (EarlyStopping, Timer)) for each in callbacks):
        rank_zero_warn(
            f"max_epochs was not given, so fit trains {DEFAULT_MAX_EPOCHS} epochs. Pass max_epochs= (-1 for no limit), "
            "max_steps= or max_time=.",
            stacklevel=2,
        )
