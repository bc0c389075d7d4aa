"""ModelCheckpoint: saves a run during fit and keeps the best checkpoints.

It decides with checkpoint_policy.py, and writes and replaces with checkpoint_files.py.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Checkpoint
from trainwright.callbacks.checkpoint_files import (
    PendingSave,
    announce,
    choose_paths,
    default_folder,
    free_link,
    is_taken,
    kept_again,
    link_newest,
    loaded,
    moved,
    path_of_stop,
    remove_replaced,
    save_failed_run,
)
from trainwright.callbacks.checkpoint_policy import (
    KEY_SETTINGS,
    Kept,
    MonitoredScore,
    Ranking,
    Save,
    check_choices,
    check_template,
    checked_intervals,
    chosen_mode,
    filled,
    name_values,
    scalar,
)
from trainwright.checkpoint.discovery import same_path
from trainwright.checkpoint.filesystem import LocalFiles, resolve
from trainwright.checkpoint.library_models import check_model
from trainwright.checkpoint.weight_files import export_settings
from trainwright.errors import CheckpointError
from trainwright.paths import absolute
from trainwright.rank_zero import rank_zero_warn, say

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer


class ModelCheckpoint(Checkpoint):
    """Saves during fit, by default at every epoch's end after its validation, and keeps the best.

    Args:
        dirpath: where to save: a path (made absolute here) or an fsspec URL, by default `checkpoints` in the logger's run
            folder. For a logger of a service that is `PROJECT/RUN_ID` under default_root_dir.
        filename: a template of the name, with {epoch}, {step} and metrics, such as "{epoch}-{val_acc:.3f}".
        monitor: the metric that decides. None keeps the newest.
        verbose: print the path of every save.
        save_last: True or "link": also keep the newest, whatever its metric, and point the link `last.ckpt` to it. Without
            symbolic links, that is a directory with a pointer. Every ckpt_path takes it. If the newest is not
            among the best, it is named `epoch=..-step=..`, not by `filename`. A fit saves an unsaved end as `end-step=..`.
        save_top_k: how many to keep: -1 for all, 0 for none. Without monitor it is -1, 0 or 1.
        save_on_exception: save `exception-epoch=..-step=..` when an exception ends the run, where an OnExceptionCheckpoint can.
            Elsewhere print why not. A first Ctrl-C or another signal raises nothing in the run: it is saved as `stop-step=..`
            without this.
        save_weights_only: omit optimizers and counters. No run can resume from such a checkpoint. If a killed run wrote one
            after the checkpoint it is resumed from, it is kept in addition to the checkpoints of the resumed run.
        mode: "min" or "max": which value of the metric is better, by default "min", with a warning for names such as "acc".
        auto_insert_metric_name: write {epoch} as "epoch=3" rather than "3".
        every_n_train_steps: optimizer steps between two saves, which follow a batch. 0 turns them off.
        train_time_interval: time between two saves: a timedelta, "DD:HH:MM:SS" or a dict of timedelta's arguments.
        every_n_epochs: save every n-th epoch. 0 turns it off. Give at most one of the three intervals.
        save_on_train_epoch_end: True saves at an epoch's end only, False after validations only. None saves after validations
            if the fit has any, otherwise at the epoch's end. The save for a validation at an epoch's end waits for that end.
        enable_version_counter: a name that is taken gets -v1, -v2, unless it is the name of a kept checkpoint which this save
            replaces. False replaces any checkpoint of that name that is not kept. Both happen once the new one is complete (on
            a file system that can rename, and never to the resume source).
        async_save: block the loop only until everything is copied to host memory. A thread writes and commits. The next save
            and the end of the run wait for it and raise its error. Replaced checkpoints are removed once it has committed.
        trained_only: omit the parameters that require no gradients and that no optimizer steps, such as the base model of an
            adapter, unless they have changed in the run. A checkpoint stores their digests instead, and a load compares these
            with the module, which is constructed with the same pretrained weights. Digests detect mistakes, not attacks.
        export: "huggingface" also writes the saved weights as the folder `huggingface` in every checkpoint, for
            `from_pretrained`, and "safetensors" as `safetensors` (see `Trainer.export`). Local disks only, without
            async_save, and not in a save by save_on_exception.

    Rank 0 decides for all ranks, by its metrics and files. Nothing is saved with fast_dev_run, and no weights that are not
    finite on some rank (NaN or infinity in a trained parameter or a norm's running statistics): a warning says so. A checkpoint
    whose metric is not finite never counts among the best. Until one is finite, the newest is kept. The newest checkpoint and
    the resume source are never deleted before another one exists. A fit from scratch keeps the files of an earlier fit.
    A metric scores only the weights it was computed with: a save by steps or time after a validation counts among the best once
    the next validation has scored its weights. It is then made again. A save that is due while gradients wait is made after
    their optimizer step.

    Raises:
        TypeError, ValueError: a setting is not accepted, or settings exclude each other.
        ValueError: from fit, if a metric that monitor or filename names was not logged.
        CheckpointError: from fit, on every rank, if a checkpoint could not be written.

    >>> best = tw.ModelCheckpoint("runs/mine", filename="{step}", monitor="val_loss")
    >>> trainer = tw.Trainer(callbacks=best, max_epochs=2, enable_model_summary=False)
    >>> trainer.fit(module, loader, val_loader)
    >>> best.best_model_path
    '...runs/mine/step=16.ckpt'
    """

    CHECKPOINT_JOIN_CHAR = "-"
    """Between the epoch and the step of the default filename. This and the next three may be overridden in a subclass."""
    CHECKPOINT_NAME_LAST = "last"
    """A template of the link's name."""
    CHECKPOINT_EQUALS_CHAR = "="
    FILE_EXTENSION = ".ckpt"

    priority = -20  # its checkpoints contain the states of the other callbacks
    reads_outputs = False

    @refuses_unknown
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
        mode: str | None = None,
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | str | dict[str, float] | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        async_save: bool = False,
        trained_only: bool = False,
        export: str | None = None,
    ) -> None:
        check_choices(save_last, save_top_k, filename, monitor)
        check_template(filename or "")
        self.every_n_train_steps, self.train_time_interval, self.every_n_epochs = checked_intervals(
            every_n_train_steps, train_time_interval, every_n_epochs
        )
        self.dirpath = absolute(dirpath).rstrip("/") if dirpath is not None else None
        self._default_dirpath: str | None = None
        self._plain_filename = f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"
        self.filename = filename if filename is not None else self._plain_filename
        self.monitor, self.verbose, self.async_save, self.trained_only = monitor, verbose, async_save, trained_only
        self.mode, self.export = chosen_mode(mode, monitor, type(self).__name__), export
        self.save_last, self.save_top_k, self.save_on_exception = save_last, save_top_k, save_on_exception
        self.save_weights_only, self.auto_insert_metric_name = save_weights_only, auto_insert_metric_name
        self.save_on_train_epoch_end, self.enable_version_counter = save_on_train_epoch_end, enable_version_counter
        if export is not None and export_settings(export) and async_save:
            raise ValueError(f"export={export!r} writes within the save. Leave out async_save=True.")
        self._is_fitting = self._has_warned_of_weights = False
        self._score, self._ranking = MonitoredScore(monitor), Ranking(monitor, self.mode, save_top_k)
        self._begin()

    def _begin(self) -> None:
        self._keep({"scores": {}, "last": "", "written_to": "", "replaced": [], "current_score": None, "link": ""})
        self._unrenamed: tuple[str, str, float | None] = ("", "", None)
        """Where the resume source was written, its final path and its score, if it was saved before it was renamed."""
        self._loaded: dict[str, Any] | None = None
        self._has_validated = self._is_validated = self._awaits_score = self._is_deferred = self._is_due = False
        self._step = -1
        self._saved_position = (-1, -1)
        """The optimizer steps and the batches of the run at the latest save."""
        self._steps: dict[str, int] = {}
        """The optimizer step of the checkpoint at every stored path."""
        self._sync_point: Any = None
        self._pending: PendingSave | None = None
        """The save that may not have committed yet, or has not been concluded."""
        self._saved_at = time.monotonic()

    def _keep(self, kept: Kept) -> None:
        """Keep these checkpoints, and show them in the public attributes."""
        self._kept = kept
        paths, worst = self._ranking.best_first(kept["scores"]), scalar(self._ranking.worst)
        ranked = paths if self.monitor is not None else []
        self.best_k_models = {path: scalar(score) for path, score in kept["scores"].items() if ranked}
        """The kept checkpoints and their scores, as tensors without dimensions, empty where nothing is monitored."""
        kth = ranked[-1] if len(ranked) >= max(self.save_top_k, 1) else ""
        self.best_model_path, self.kth_best_model_path = paths[0] if paths else "", kth
        """The best checkpoint, and the worst kept one, which is "" while there are fewer than save_top_k."""
        self.best_model_score: Tensor | None = self.best_k_models[paths[0]] if ranked else None
        self.kth_value: Tensor = self.best_k_models[kth] if kth else worst
        self.last_model_path = kept["last"]
        score = kept["current_score"]
        self.current_score: Tensor | None = None if score is None else worst if math.isnan(score) else scalar(score)

    @property
    def keeps_any(self) -> bool:
        return bool(self.save_top_k or self.save_last)

    @property
    def state_key(self) -> str:
        settings = ", ".join([f"{name}={getattr(self, name)}" for name in KEY_SETTINGS])
        return f"{type(self).__qualname__}({settings})"

    def state_dict(self) -> dict[str, Any]:
        kept, is_monitored = self._kept, self.best_model_score is not None
        best = kept["scores"][self.best_model_path] if is_monitored else None
        saves: dict[str, Any] = {name: kept[name] for name in ("replaced", "current_score", "link")}
        saves |= {"best_k_models": dict(kept["scores"]), "last_model_path": kept["last"], "place": kept["written_to"]}
        flags = {"is_put_off": self._is_deferred or self._is_due, "awaits_score": self._awaits_score}
        steps = {"saved_at": list(self._saved_position), "steps": dict(self._steps), "is_validated": self._is_validated}
        return {**saves, **flags, **steps, "best_model_path": self.best_model_path, "best_model_score": best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the kept checkpoints, as far as they exist in this run's folder, and with a dirpath also the best in others."""
        state = {**state, **state.get("moments", {})}  # older checkpoints have some values there
        self._loaded = state
        kept = loaded(state, self.dirpath or "", ranks_others=bool(self.monitor and self.given_dirpath))
        self._keep(kept)
        self._is_deferred, self._awaits_score = bool(state.get("is_put_off")), bool(state.get("awaits_score"))
        self._is_validated = bool(state.get("is_validated"))
        self._steps = dict(state.get("steps", {}))
        step, batches = state.get("saved_at", (-1, -1)) if kept["last"] else (-1, -1)  # else it is in another folder
        self._saved_position = int(step), int(batches)
        last, written_to = state["last_model_path"], kept["written_to"]
        self._unrenamed = (written_to, last, state["best_k_models"].get(last)) if written_to != last else ("", "", None)

    def __getstate__(self) -> dict[str, Any]:
        # These belong to this process's run.
        return {**super().__getstate__(), "_sync_point": None, "_pending": None}

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        self._is_fitting = stage == "fit" and not trainer.fast_dev_run
        if stage == "fit":
            self._begin()
        if self._is_fitting:
            folder = self.folder_in(trainer)
            if self.export is not None and not isinstance(resolve(folder)[0], LocalFiles):
                raise ValueError(f"export={self.export!r} needs a local dirpath, but this one is {folder}.")
            if self.given_dirpath is None:
                self.dirpath = self._default_dirpath = folder

    def folder_in(self, trainer: AnyTrainer) -> str:
        """Return the folder that this run saves in, once its loggers have theirs."""
        return self.given_dirpath or default_folder(trainer)

    @property
    def given_dirpath(self) -> str | None:
        """Return the user's folder, or None for the default one."""
        return None if self.dirpath == self._default_dirpath else self.dirpath

    def on_train_start(self, trainer: AnyTrainer, module: Module) -> None:
        if self._is_fitting and self.trained_only:
            trainer.engine.note_base()
        if self._is_fitting and self.export == "huggingface":
            check_model(module)
        self._saved_at = time.monotonic()
        source, folder = trainer.resume_source or "", self.dirpath or ""
        if self._loaded is not None and same_path(source.rpartition("/")[0], folder):
            ModelCheckpoint.load_state_dict(self, moved(self._loaded, folder))
        self._step = trainer.global_step
        self._keep(kept_again(self._kept, self._unrenamed, self._steps, trainer))
        if self.train_time_interval is not None and self._is_fitting:
            self._sync_point = trainer.engine.connection.sync_point(self.state_key)

    def on_resume_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Make the save that was due when another callback wrote the checkpoint that the run resumes from."""
        self._has_validated = self._has_validated or trainer.state.validations > 0
        self._is_due = self._is_fitting and self._is_deferred
        self.on_save_point(trainer, module)

    def on_save_point(self, trainer: AnyTrainer, module: Module) -> None:
        """Make the save that an earlier hook has found due. Collective."""
        if self._is_due:
            self._save(trainer)

    def on_train_batch_end(self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._pending is not None and self._pending.waits:
            self._pending.remove_dropped(trainer)  # the work of all ranks waits for the next save
        if not self._is_fitting or (self.every_n_train_steps == 0 and self.train_time_interval is None):
            return
        previous, self._step = self._step, trainer.global_step
        if self._step != previous and self._reaches_interval(trainer, previous):
            self._is_deferred, self._awaits_score = True, self._score.is_pending(trainer)
        self._is_due = self._is_deferred and not trainer.state.progress.is_within_window

    def _reaches_interval(self, trainer: TrainerProtocol, previous: int) -> bool:
        """Return whether to save after the optimizer steps since a previous one, the same on every rank."""
        if self._sync_point is None:
            return self._step // self.every_n_train_steps > previous // self.every_n_train_steps
        if trainer.is_global_zero and time.monotonic() - self._saved_at >= (self.train_time_interval or 0.0):
            self._saved_at = time.monotonic()
            self._sync_point.request()
        return bool(self._sync_point.is_reached(trainer.global_step))  # the clocks of the ranks differ

    def on_validation_end(self, trainer: AnyTrainer, module: Module) -> None:
        if not self._is_fitting or trainer.sanity_checking:
            return
        self._has_validated = True
        self._is_validated = not trainer.state.progress.is_mid_epoch_validation
        is_scored, self._awaits_score = self._awaits_score and not self._score.is_pending(trainer), False
        if self._is_validated:  # the epoch's end saves
            self._is_deferred = self._is_deferred or is_scored
        else:
            self._is_due = is_scored or (not self.save_on_train_epoch_end and self._is_chosen(trainer))

    def on_train_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        if not self._is_fitting or not trainer.state.epoch_ended:
            return
        is_validated, self._is_validated = self._is_validated, False
        ends = not trainer.enable_validation if self.save_on_train_epoch_end is None else self.save_on_train_epoch_end
        self._is_due = self._is_deferred or (self._is_chosen(trainer) and (is_validated or ends))

    def on_train_epoch_stop(self, trainer: AnyTrainer, module: Module) -> None:
        self._is_validated = False
        is_due = self._is_deferred or self._is_chosen(trainer)
        if self._is_fitting and (is_due or (self.save_last and not self._is_saved(trainer))):
            # Not at the next save point, since a run that resumes from here trains on without on_train_epoch_end.
            self._save(trainer, is_left=True)

    def _is_chosen(self, trainer: TrainerProtocol) -> bool:
        return self.every_n_epochs > 0 and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def _is_saved(self, trainer: TrainerProtocol) -> bool:
        """Return whether the current state is saved, or will be once the pending save is done."""
        return self._saved_position == (trainer.global_step, trainer.state.total_batches)

    def on_train_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._conclude(trainer)
        if self.save_last and trainer.state.total_batches and not self._is_saved(trainer):
            self.save_stop(trainer, "end", self.save_weights_only)

    def _save(self, trainer: TrainerProtocol, is_left: bool = False) -> None:
        """Save if rank 0 finds it worthwhile. Collective.

        If the epoch `is_left`, a state that is already saved with the same score is not saved again. A metric of the file's
        name that comes from the epoch's end may then be missing.
        """
        self._is_deferred = self._is_due = False
        if not self.keeps_any:
            return
        self._conclude(trainer)
        plan = trainer.engine.ranks.decide(lambda: self._plan(trainer, is_left), "a save of ModelCheckpoint")
        if plan is None or self._refuses_weights(trainer):
            return
        save = Save(*plan)
        before = self._kept
        # The saved state includes this save: a resumed run finds its own checkpoint among the kept ones.
        self._keep(self._ranking.kept_after(before, save, self.dirpath or ""))
        self._saved_position = trainer.global_step, trainer.state.total_batches
        self._steps = {path: step for path, step in self._steps.items() if path in self._kept["scores"]}
        self._steps |= dict.fromkeys((save.path, save.written_to), trainer.global_step)
        is_begun = self._write(trainer, before, self.save_weights_only, blocking=not self.async_save)
        if is_begun:
            where = f"epoch {trainer.current_epoch}, step {trainer.global_step}"
            report = f"{where}: saved {save.path}" if self.verbose else ""
            thread = trainer.engine.writer.in_flight if self.async_save else None
            paths = save.path, save.written_to, self._kept["replaced"], (save.link, before["link"])
            self._pending = PendingSave(*paths, thread, partial(self._keep, before), self._keep_replaced, report)
        if not self.async_save:
            self._conclude(trainer)

    def _refuses_weights(self, trainer: TrainerProtocol) -> bool:
        """Return whether the weights are not finite on some rank, and warn once until they are again. Collective."""
        fault, last = trainer.engine.find_fault(), self._kept["last"]
        if fault and not self._has_warned_of_weights:
            stays = f"{last} stays as the newest one" if last else "No checkpoint exists to resume from"
            rank_zero_warn(
                f"ModelCheckpoint saves nothing in epoch {trainer.current_epoch}, at step {trainer.global_step}: {fault}. "
                f"{stays}, and nothing is saved until the weights are finite again.",
                stacklevel=2,
            )
        self._has_warned_of_weights = bool(fault)
        return bool(fault)

    def _write(self, trainer: TrainerProtocol, before: Kept, weights_only: bool = False, blocking: bool = True) -> bool:
        """Write the newest checkpoint. If that fails, keep the previous checkpoints. Collective."""
        try:
            settings: dict[str, Any] = {"trained_only": self.trained_only, "export": self.export}
            return trainer.save_checkpoint(self._kept["written_to"], weights_only, blocking=blocking, **settings)
        except BaseException:
            self._keep(before)
            raise

    def _conclude(self, trainer: TrainerProtocol) -> None:
        """Wait for the pending save and conclude it. Collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.conclude(trainer)
            if pending.is_committed:
                announce(self, trainer, self._module())

    def _keep_replaced(self, paths: list[str]) -> None:
        self._kept["replaced"] = paths

    def _plan(self, trainer: TrainerProtocol, is_left: bool) -> Save | None:
        """Return the save to make, or None for no save. A missing metric is a ValueError. On rank 0."""
        score, scores = self._score.read(trainer, self._has_validated), self._kept["scores"]
        if is_left and self._is_saved(trainer) and repr(score) == repr(self._kept["current_score"]):
            return None  # by their text, since NaN, an unknown score, is not equal to itself
        is_best = self._ranking.accepts(score, scores)
        is_stopgap = not is_best and self.save_top_k != 0 and not scores
        if not is_best and not is_stopgap and not self.save_last:
            return None
        if is_stopgap:
            self._score.warn_of_value(trainer, score, self._awaits_score)
        dropped = self._ranking.dropped(self._kept, is_best)
        # The checkpoint that only save_last keeps must not have the name that the user gave to the best.
        template = self.filename if is_best or not scores else self._plain_filename
        values = name_values(trainer, self.monitor, template, is_left)
        path, written_to = choose_paths(
            lambda version: self.format_checkpoint_name(values, template, version),
            lambda path: self.file_exists(path, trainer),
            dropped,
            scores,
            trainer.resume_source or "",
            replaces_any=not self.enable_version_counter,
        )
        return Save(path, written_to, score, is_best, dropped, self._link(trainer, is_left, path, written_to))

    def _link(self, trainer: TrainerProtocol, is_left: bool, *saved: str) -> str:
        """Return the path of the link to a checkpoint, or "" without save_last. On rank 0."""
        template = self.CHECKPOINT_NAME_LAST
        values = name_values(trainer, self.monitor, template, is_left)
        return free_link(partial(self.format_checkpoint_name, values, template), saved) if self.save_last else ""

    def save_stop(self, trainer: AnyTrainer, name: str = "stop", weights_only: bool = False) -> str:
        """Save a run that ends here as `stop-step=..`, whatever its metric and the intervals. Collective.

        On a stop the first ModelCheckpoint that keeps checkpoints is called, and saves everything, even with
        `save_weights_only`. Return the path, or the path of a checkpoint of this very position, or "" if nothing is saved
        (weights that are not finite).
        """
        if not self._is_fitting or not self.keeps_any:
            return ""
        try:
            self._conclude(trainer)
        except CheckpointError as error:  # the same on every rank, and the save below may still succeed
            if trainer.is_global_zero:
                say(f"trainwright: {error}")
        find = partial(path_of_stop, trainer, self._kept, f"{self.dirpath}/{name}", self.FILE_EXTENSION)
        path, is_there = trainer.engine.ranks.decide(find, "the save of a run that ends")
        if is_there:
            return str(path)
        if self._refuses_weights(trainer):
            return ""
        link_of = partial(self._link, trainer, True, path)
        before, link = self._kept, trainer.engine.ranks.decide(link_of, "the save of a run that ends")
        replaced = [*before["replaced"], *self._ranking.dropped(before, is_best=False)]
        self._keep({**before, "last": path, "written_to": path, "replaced": replaced, "link": link})
        self._write(trainer, before, weights_only)
        link_newest((link, before["link"]), path, trainer)
        self._keep_replaced(remove_replaced(replaced, path, trainer))
        announce(self, trainer, self._module())
        return str(path)

    def on_exception(self, trainer: AnyTrainer, module: Module, exception: BaseException) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.conclude_alone(trainer)
        if self.save_on_exception and self._is_fitting and self._step >= 0:  # its training has begun
            stem = f"{self.dirpath}/exception-epoch={trainer.current_epoch}-step={trainer.global_step}"
            kinds = {"weights_only": self.save_weights_only, "trained_only": self.trained_only}
            save_failed_run("save_on_exception", trainer, stem, self.FILE_EXTENSION, **kinds)

    def file_exists(self, filepath: str, trainer: TrainerProtocol) -> bool:
        """Return whether a checkpoint, or anything else, is at this path. Called on rank 0."""
        return is_taken(filepath)

    def format_checkpoint_name(
        self, metrics: Mapping[str, Any], filename: str | None = None, ver: int | None = None
    ) -> str:
        """Return the path of a template, by default this callback's. A missing metric is a ValueError."""
        equals = self.CHECKPOINT_EQUALS_CHAR if self.auto_insert_metric_name else None
        version = "" if ver is None else f"-v{ver}"
        name = f"{filled(filename or self.filename, metrics, equals)}{version}{self.FILE_EXTENSION}"
        return f"{self.dirpath}/{name}" if self.dirpath else name
