"""ModelCheckpoint: when a run is saved, which of its checkpoints are kept, and where."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.callbacks.base import Callback
from trainwright.callbacks.checkpoint_moments import Moments
from trainwright.callbacks.checkpoint_name import SUFFIX, check_template, fill_template, name_values
from trainwright.callbacks.checkpoint_place import choose_place, is_taken, makes_room, remove_replaced
from trainwright.callbacks.checkpoint_retention import PendingSave, found_again
from trainwright.callbacks.checkpoint_score import MonitoredScore
from trainwright.callbacks.checkpoint_settings import KEY_SETTINGS, check_choices, check_top_k, checked_intervals
from trainwright.callbacks.checkpoint_weights import WeightsCheck
from trainwright.callbacks.stopped_run import save_failed_run, save_stopped_run
from trainwright.checkpoint.store import is_checkpoint, same_place, sweep_temporaries
from trainwright.data.seeding import rng_state
from trainwright.duration import to_seconds
from trainwright.loggers.position import CHECKPOINTS
from trainwright.paths import absolute

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.trainer.trainer import Trainer


class ModelCheckpoint(Callback):
    """Saves during fit, by default at each epoch's end after its validation, and keeps the best.

    Args:
        dirpath: where to save, a path (made absolute here) or an fsspec URL; by default `checkpoints` in the logger's folder
            of the run.
        filename: a template of the name, with {epoch}, {step} and metrics, such as "{epoch}-{val_acc:.3f}".
        monitor: the metric to judge by; None keeps the newest.
        verbose: print the path of each save.
        save_last: True or "link": keep the newest too, under its own name, whatever its metric.
        save_top_k: how many to keep: -1 for all, 0 for none; without monitor -1, 0 or 1.
        save_on_exception: save `exception-epoch=..-step=..` when an exception or Ctrl-C ends the run, where that can be
            resumed exactly: on one process (a save is made by all ranks together, and the others may live), and between two
            batches: while the next one is loaded, in a validation within an epoch until its metrics are known, or in the
            hooks of an epoch's start. Within a batch (its hooks too) generators and buffers have moved, in an accumulation
            window gradients wait, and at an epoch's end schedulers have stepped: it says then why it does not save.
        save_weights_only: leave out optimizers and counters; a run cannot be resumed from such a checkpoint. One that a killed
            run has written after the checkpoint it is resumed from stays beside what the resumed run writes.
        mode: "min" or "max": which value of the metric is better.
        auto_insert_metric_name: write {epoch} as "epoch=3" rather than "3".
        every_n_train_steps: optimizer steps between two saves; 0 switches them off.
        train_time_interval: time between two saves: a timedelta, "DD:HH:MM:SS" or a dict of timedelta's arguments.
        every_n_epochs: save in each n-th epoch; 0 switches it off. Of the three intervals one may be given.
        save_on_train_epoch_end: True saves at an epoch's end only; False after validations only; None after each validation
            of a fit that has one, else at the epoch's end. A validation at an epoch's end is followed by the save of that
            epoch's end, from which a run goes on with the next epoch.
        enable_version_counter: a name that is taken gets -v1, -v2, unless it is that of a kept checkpoint which this save
            takes the place of; False replaces whatever checkpoint has that name and is not to be kept. Either is done once
            the new one is whole (on a file system that can rename, and never to the one that the run was resumed from).
        async_save: hold the loop only until all is copied to host memory; a thread writes and commits meanwhile. The next save
            and the end of the run wait for it and raise its error. What a save takes the place of goes once it has committed.

    Weights that are not finite (NaN or infinity in a trained parameter or a norm's running statistics, on whatever rank) are
    not saved, and the run says so: the checkpoints that are there stay. A checkpoint whose metric is not finite never counts
    among the best; as long as there are none, the newest is kept. The newest checkpoint, and the one that the run was resumed
    from, are never deleted before another one is there. A validation's metric is the score of the weights that got it alone: a
    save by steps or time that follows one counts among the best when the next validation has scored its weights, and is made
    again then. A save that is due while gradients wait for a step of manual optimization is made after that. Nothing is saved
    with fast_dev_run. Rank 0 decides for all, by its own metrics and files. A fit that begins anew keeps its own best ones,
    and leaves the files of an earlier fit alone.

    >>> best = tw.ModelCheckpoint("runs/mine", filename="{step}", monitor="val_loss")
    >>> trainer = tw.Trainer(callbacks=best, max_epochs=2, enable_model_summary=False)
    >>> trainer.fit(module, loader, val_loader)
    >>> best.best_model_path
    '...runs/mine/step=16.ckpt'
    """

    runs_last = True
    reads_outputs = False
    counts_rounds = True

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | str | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | str | dict[str, float] | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        async_save: bool = False,
    ) -> None:
        check_choices(mode, save_last, filename, monitor)
        check_top_k(save_top_k, monitor)
        check_template(filename or "")
        self.every_n_train_steps, self.every_n_epochs = checked_intervals(
            every_n_train_steps, train_time_interval, every_n_epochs
        )
        self.train_time_interval = (
            None if train_time_interval is None else to_seconds(train_time_interval, name="train_time_interval")
        )
        self.dirpath = absolute(dirpath).rstrip("/") if dirpath is not None else None
        self._default_dirpath: str | None = None
        self.filename = filename if filename is not None else "{epoch}-{step}"
        self.monitor, self.verbose, self.mode = monitor, verbose, mode
        self.save_last, self.save_top_k, self.save_on_exception = save_last, save_top_k, save_on_exception
        self.save_weights_only, self.auto_insert_metric_name = save_weights_only, auto_insert_metric_name
        self.save_on_train_epoch_end, self.enable_version_counter = save_on_train_epoch_end, enable_version_counter
        self.async_save = async_save
        self._is_fitting = False
        self._score = MonitoredScore(monitor)
        self._weights = WeightsCheck()
        self._watches_batches = self.every_n_train_steps > 0 or self.train_time_interval is not None
        self._begin()

    def _begin(self) -> None:
        """Forget what the latest fit has kept, and where it stood."""
        self.best_k_models: dict[str, Tensor] = {}
        """The kept checkpoints and their scores, as tensors of no dimension; 0 where nothing is monitored."""
        self.best_model_path = self.last_model_path = self.kth_best_model_path = ""
        self.best_model_score: Tensor | None = None
        self.kth_value: Tensor | None = None
        self.current_score: Tensor | None = None
        self._has_begun = self._has_validated = self._is_put_off = self._awaits_score = False
        self._place = ""
        """Where the newest one was written, before it got its path."""
        self._unrenamed: tuple[str, str, float | None] = ("", "", None)
        """Of the checkpoint that a run goes on from: where it was written, which path it was to get, and its score."""
        self._replaced: list[str] = []
        """Checkpoints whose place the newest takes, and which go once it is there: the resume source in a later run."""
        self._generators: dict[str, Any] = {}
        """As they were before the validation that runs; kept for save_on_exception."""
        self._sync_point: Any = None
        self._moments = Moments()
        self._pending: PendingSave | None = None
        """The save that was begun and may not have committed yet, or not have been followed up."""
        self._saved_at = time.monotonic()

    @property
    def state_key(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)}" for name in KEY_SETTINGS)
        return f"{type(self).__qualname__}({settings})"

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_k_models": {path: float(score) for path, score in self.best_k_models.items()},
            "best_model_path": self.best_model_path,
            "best_model_score": None if self.best_model_score is None else float(self.best_model_score),
            "last_model_path": self.last_model_path,
            "place": self._place,
            "is_put_off": self._is_put_off,
            "awaits_score": self._awaits_score,
            "replaced": self._replaced,
            "moments": self._moments.state_dict(),
            "current_score": None if self.current_score is None else float(self.current_score),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the kept checkpoints, as far as they still exist in this run's own folder."""

        def is_ours(path: str) -> bool:
            return same_place(path.rpartition("/")[0], self.dirpath or "") and is_checkpoint(path)

        self.best_k_models = {path: _scalar(score) for path, score in state["best_k_models"].items() if is_ours(path)}
        last, place = state["last_model_path"], state.get("place", "")
        self._place, self._is_put_off = place, bool(state.get("is_put_off"))
        self._awaits_score = bool(state.get("awaits_score"))
        self.last_model_path = last if is_ours(last) else ""
        self._moments.load_state_dict(state.get("moments", {"step": state.get("step_seen", -1)}), is_ours(last))
        self._replaced = [path for path in state.get("replaced", []) if is_ours(path)]
        self._unrenamed = (place, last, state["best_k_models"].get(last)) if place != last else ("", "", None)
        current = state.get("current_score")
        self.current_score = None if current is None else _scalar(current)
        self._judge()

    def __getstate__(self) -> dict[str, Any]:
        # These belong to this process's run.
        return {**super().__getstate__(), "_sync_point": None, "_pending": None, "_generators": {}}

    # -- when to save ------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._is_fitting = stage == "fit" and not trainer.fast_dev_run
        if stage == "fit":
            self._begin()
        if not self._is_fitting:
            return
        folder = self.folder_in(trainer)
        if self.given_dirpath is None:
            self.dirpath = self._default_dirpath = folder
        if trainer.is_global_zero:
            sweep_temporaries(folder)  # what killed writers have left

    def folder_in(self, trainer: Trainer) -> str:
        """Return the folder that this run saves in, once its loggers have theirs."""
        return self.given_dirpath or f"{trainer.log_dir or trainer.default_root_dir}/{CHECKPOINTS}"

    @property
    def given_dirpath(self) -> str | None:
        """Return the folder that was asked for; None where it is the default one, also when a run has chosen that."""
        return None if self.dirpath == self._default_dirpath else self.dirpath

    @property
    def keeps_any(self) -> bool:
        """Return whether it is to keep any checkpoint."""
        return bool(self.save_top_k or self.save_last)

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._saved_at, self._has_begun = time.monotonic(), True
        self._moments.begin(trainer)
        if self._watches_batches:
            self._moments.note_step(trainer)
        if trainer.resume_source is not None:
            self._take_rank_zeros(trainer)
            # A killed run may not have come to it.
            self._replaced = remove_replaced(self._replaced, trainer.resume_source, trainer)
        if self.train_time_interval is not None and self._is_fitting:
            self._sync_point = trainer.sync_point(self.state_key)

    def _make_up(self, trainer: Trainer) -> None:
        """Make the save that was due where another callback's, made before it, is what the run goes on from."""
        state = trainer.state
        self._has_validated = self._has_validated or state.validations > 0
        if not self._is_fitting:
            return
        if self._moments.misses_end(trainer):
            self._end(trainer)
        elif self._moments.misses_validation(trainer):
            self._follow_validation(trainer, is_within=True)
        elif self._is_put_off or self._moments.misses_step(trainer, self.every_n_train_steps):
            self._awaits_score = self._score.is_to_come(trainer)
            self._save(trainer)

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._pending is not None and self._pending.dropped and self._pending.is_committed:
            self._pending.remove_dropped(trainer)  # the rest is every rank's, at the next save
        if self._is_put_off and not trainer.is_within_window:
            self._save(trainer)
        if self._watches_batches and self._moments.note_step(trainer) and self._is_fitting and self._is_due(trainer):
            self._awaits_score = self._score.is_to_come(trainer)
            self._is_put_off = trainer.is_within_window
            if not self._is_put_off:
                self._save(trainer)

    def _is_due(self, trainer: Trainer) -> bool:
        """Return, alike on every rank, whether this optimizer step is one to save after."""
        if self._sync_point is None:
            return trainer.global_step % self.every_n_train_steps == 0
        if trainer.is_global_zero and time.monotonic() - self._saved_at >= (self.train_time_interval or 0.0):
            self._saved_at = time.monotonic()
            self._sync_point.request()
        return bool(self._sync_point.is_reached(trainer.global_step))

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        if self.save_on_exception and self._has_begun and self._is_fitting:
            self._generators = rng_state()

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        self._generators = {}
        if not self._is_fitting or trainer.sanity_checking:
            return
        self._has_validated = True
        self._follow_validation(trainer, is_within=trainer.is_mid_epoch_validation)

    def _follow_validation(self, trainer: Trainer, is_within: bool) -> None:
        """Save after a validation, `is_within` an epoch; an epoch's end saves for itself."""
        self._moments.note_validation(trainer, is_within)
        awaited, self._awaits_score = self._awaits_score and not self._score.is_to_come(trainer), False
        if not is_within:
            self._is_put_off = self._is_put_off or awaited
        elif awaited or (not self.save_on_train_epoch_end and self._is_chosen(trainer)):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self._is_fitting:
            self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        """Save at the end of an epoch, or of a run that stops within it."""
        self._moments.note_end(trainer)
        is_validated, is_whole = self._moments.take_validated(), trainer.state.epoch_ended
        ends = not trainer.enable_validation if self.save_on_train_epoch_end is None else self.save_on_train_epoch_end
        if self._is_put_off or (self._is_chosen(trainer) and (is_validated or ends or not is_whole)):
            # A run that is stopped within an epoch is saved as it stands; a validation may have done so, with this score.
            self._save(trainer, may_repeat=is_whole)
        elif self.save_last and not is_whole and not self._moments.is_saved(trainer):
            self._save(trainer)

    def _is_chosen(self, trainer: Trainer) -> bool:
        return self.every_n_epochs > 0 and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._conclude(trainer)

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._sync_point = None

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.conclude_alone(trainer)
        if self.save_on_exception and self._is_fitting and self._has_begun:
            save_failed_run(self, trainer)

    def save_stop(self, trainer: Trainer, name: str = "stop") -> str:
        """Save a run that a signal has stopped, whole and whatever its metric and the intervals, as `stop-step=..`.

        Return the path, also of a checkpoint of this very position that is there already; "" where nothing is to be saved.
        Collective: call on every rank.
        """
        if not self._is_fitting or not self.keeps_any:
            return ""
        return save_stopped_run(self, trainer, name)

    # -- what to save and to keep ------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, may_repeat: bool = True) -> None:
        """Save, if rank 0 finds it worth it; `may_repeat`: also where that is done, with the same score. Collective."""
        self._is_put_off = False
        if not self.keeps_any:
            return
        self._conclude(trainer)
        plan = trainer.engine.ranks.decide(lambda: self._plan(trainer, may_repeat), "a save of ModelCheckpoint")
        if plan is None or self._weights.refuses(trainer, self.last_model_path):
            return
        path, place, score, is_best, dropped = plan
        # The state that is saved with it knows of itself: a resumed run finds its own checkpoint among the kept ones.
        before = (dict(self.best_k_models), self.last_model_path, self.current_score, self._place, self._replaced)

        def put_back() -> None:
            self.best_k_models, self.last_model_path, self.current_score, self._place, self._replaced = before
            self._judge()

        for each in dropped:
            self.best_k_models.pop(each, None)
        if is_best:
            self.best_k_models[path] = _scalar(0.0 if score is None else score)
        self.last_model_path, self._place = path, place
        self._replaced = [each for each in dict.fromkeys([*self._replaced, *dropped]) if not same_place(each, path)]
        self.current_score = None if score is None else _scalar(score)
        self._judge()
        self._moments.note_save(trainer, (path, place), self.best_k_models)
        try:
            is_begun = trainer.save_checkpoint(place, self.save_weights_only, blocking=not self.async_save)
        except BaseException:
            put_back()
            raise
        if is_begun:
            report = f"epoch {trainer.current_epoch}, step {trainer.global_step}: saved {path}" if self.verbose else ""
            save = trainer.engine.writer.in_flight if self.async_save else None
            self._pending = PendingSave(path, place, self._replaced, save, put_back, self._keep_replaced, report)
        if not self.async_save:
            self._conclude(trainer)

    def _conclude(self, trainer: Trainer) -> None:
        """Follow up on the save that was begun last, once it has committed. Collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.conclude(trainer)

    def _keep_replaced(self, paths: list[str]) -> None:
        self._replaced = paths

    def _plan(self, trainer: Trainer, may_repeat: bool) -> tuple[str, str, float | None, bool, list[str]] | None:
        """Return the path of a save, where to write it, its score, whether it is kept as one of the best, and what goes.

        None where it is not worth a save. Rank 0's.

        Raises:
            ValueError: a metric that is needed was not logged.
        """
        score = self._score.read(trainer, self._has_validated)
        if not may_repeat and self._moments.is_saved(trainer) and score == self.current_score:
            return None
        is_best = self._is_among_best(score)
        is_stopgap = not is_best and self.save_top_k != 0 and not self.best_k_models
        if not is_best and not is_stopgap and not self.save_last:
            return None
        if is_stopgap:
            self._score.warn_of_value(trainer, score, self._awaits_score)
        dropped = []
        if is_best and -1 < self.save_top_k <= len(self.best_k_models):
            dropped.append(max(self.best_k_models, key=lambda each: self._rank(self.best_k_models[each])))
        if self.last_model_path and self.last_model_path not in self.best_k_models:
            dropped.append(self.last_model_path)
        path, place = self._choose_path(trainer, dropped)
        return path, place, score, is_best, dropped

    def _take_rank_zeros(self, trainer: Trainer) -> None:
        """Keep what rank 0 has found of the checkpoints that a resumed run has kept before. Collective."""

        def found() -> list[Any]:
            kept = {path: float(score) for path, score in self.best_k_models.items()}
            source, steps = trainer.resume_source or "", self._moments.steps
            return [*found_again(kept, self.last_model_path, self._replaced, self._unrenamed, steps, source)]

        kept, last, self._replaced = trainer.engine.ranks.decide(found, "the start of ModelCheckpoint")
        self.best_k_models, self.last_model_path = {path: _scalar(score) for path, score in kept.items()}, last
        self._judge()

    def _is_among_best(self, score: float | None) -> bool:
        if self.save_top_k == 0 or (score is not None and not math.isfinite(score)):
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k or score is None:
            return True
        return self._rank(score) < max(self._rank(each) for each in self.best_k_models.values())

    def _judge(self) -> None:
        """Say which of the kept ones is the best and which the worst: by age where nothing is monitored."""
        paths = list(reversed(self.best_k_models))
        if self.monitor is not None:
            paths = sorted(self.best_k_models, key=lambda path: self._rank(self.best_k_models[path]))
        self.best_model_path, self.kth_best_model_path = (paths[0], paths[-1]) if paths else ("", "")
        is_judged = bool(paths) and self.monitor is not None
        self.best_model_score = self.best_k_models[paths[0]] if is_judged else None
        self.kth_value = self.best_k_models[paths[-1]] if is_judged else None

    def _rank(self, score: float | Tensor) -> float:
        return float(score) if self.mode == "min" else -float(score)

    # -- where to save -----------------------------------------------------------------------------------------------

    def _choose_path(self, trainer: Trainer, dropped: list[str]) -> tuple[str, str]:
        """Return the path of this save, and where to write it: elsewhere if it replaces what has that path. Rank 0's."""
        values = name_values(trainer, self.monitor, self.filename)
        plain = self.format_checkpoint_name(values)

        def is_replaced(path: str) -> bool:
            may_go = not self.enable_version_counter and path == plain
            return makes_room(path, dropped, self.best_k_models, trainer.resume_source or "", may_go)

        return choose_place(
            lambda version: self.format_checkpoint_name(values, ver=version),
            lambda path: self.file_exists(path, trainer),
            is_replaced,
        )

    def file_exists(self, filepath: str, trainer: Trainer) -> bool:
        """Return whether a checkpoint, or anything else, has this path; asked for on rank 0."""
        return is_taken(filepath)

    def format_checkpoint_name(
        self, metrics: Mapping[str, Any], filename: str | None = None, ver: int | None = None
    ) -> str:
        """Return the path that a template (this callback's, or the one given) gives with these values.

        Raises:
            ValueError: the template asks for a metric that was not logged.
        """
        values = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        name = fill_template(filename or self.filename, values, insert_names=self.auto_insert_metric_name)
        name = f"{name}{SUFFIX}" if ver is None else f"{name}-v{ver}{SUFFIX}"
        return f"{self.dirpath}/{name}" if self.dirpath else name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({json.dumps(self.monitor)}, mode={self.mode!r}, save_top_k={self.save_top_k})"


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
