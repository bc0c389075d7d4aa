"""Choice of a checkpoint: what ckpt_path means, whether that is complete, and which run folder the fit continues in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import fsspec

from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint.discovery import CheckpointEntry, find_candidates, is_newest, same_path
from trainwright.checkpoint.lock import lock_folder
from trainwright.checkpoint.reader import StoredCheckpoint, Verify, check_verify
from trainwright.distributed.ranks import Ranks
from trainwright.engine.engine import Engine
from trainwright.errors import CheckpointError, MissingCheckpoint, a_type_of
from trainwright.loggers import Logger
from trainwright.loggers.files import CHECKPOINTS
from trainwright.loggers.folder import FolderLogger
from trainwright.loggers.remote import RemoteLogger
from trainwright.rank_zero import rank_zero_warn

NAMES = ("best", "last", "auto")
CALL = "the choice of a checkpoint"
FALL_BACK = "(ckpt_path='auto' falls back to the one before it.)"


@dataclass(frozen=True)
class Choice:
    path: str | None = None
    """None for no checkpoint; "auto" if the call starts workers, which then choose."""
    checkpoint: StoredCheckpoint | None = None
    """The same, verified; None if the call starts workers."""
    loggers: list[dict[str, Any]] = field(default_factory=list)
    """The loggers' positions at the save, for a fit."""
    continues: bool = False
    """Whether it is the newest of its folder, so that this run continues that one instead of branching off."""
    is_rerunnable: bool = False
    """Whether the same call may be repeated, and is then to find the end of the run."""


def lock_folders(ranks: Ranks, folders: Iterable[str | None], locks: ExitStack) -> None:
    """Lock the known folders (not None) until `locks` is closed. Collective.

    Raises:
        CheckpointError: on every rank, if another run has locked one.
    """

    def take() -> None:
        for folder in dict.fromkeys(folders):
            if folder is not None:
                locks.callback(lock_folder(folder).release)

    ranks.decide(take, "the locks of the checkpoints' folders")


@dataclass(frozen=True)
class CheckpointSearch:
    """Finds the checkpoint of one call.

    A path is itself. "best" is the best of the first ModelCheckpoint that has one. "last" and "auto" are the one of the
    highest step in the folders of all ModelCheckpoints. The default folder is in the newest run folder of the logger that has
    any checkpoint. A fit ignores checkpoints with weights only. If that checkpoint is damaged, "last" is an error. "auto"
    warns and takes the next lower one that is complete. A fit without any starts from scratch.

    A fit from the newest checkpoint of a folder (damaged ones aside) continues in the run folder of the loggers that it was
    saved with. Their later rows are cut and written again. A fit from an older one is a branch: its loggers begin another
    run folder. If theirs is fixed (a version was given, or the trainer has run before) they cut nothing.
    """

    engine: Engine
    callbacks: Sequence[ModelCheckpoint]
    loggers: Sequence[Logger]
    root: str
    """The folder of the checkpoints of a run whose loggers have no folder."""
    call: str
    verify: Verify
    is_trial: bool
    """Whether it is a fit with fast_dev_run, which does not resume by "auto"."""
    say: Callable[[str], None]

    def choose(self, ckpt_path: str | os.PathLike[str] | None) -> Choice:
        """Return the verified checkpoint that ckpt_path means. Collective: call on every rank.

        Raises:
            ValueError: a name without a ModelCheckpoint, or an unknown verify.
            CheckpointError: there is none, or it is damaged.
        """
        check_verify(self.verify)
        name = _checked(ckpt_path)
        if name is None or (name == "auto" and self.is_trial):
            return Choice()
        if name in NAMES and not self.callbacks:
            raise ValueError(
                f"ckpt_path={name!r} needs a ModelCheckpoint, but this trainer has none. Pass a path, or leave "
                "enable_checkpointing at True."
            )
        self.engine.finish_save()  # a save in flight may be the checkpoint that is searched for
        if name == "auto" and self.engine.num_workers:
            return Choice("auto")
        if name in ("last", "auto"):
            return self._newest(name)
        path = self.engine.ranks.decide(self._best, CALL) if name == "best" else name
        try:
            # A missing checkpoint is the caller's error, not the workers'.
            checkpoint = self.engine.verified(path, "off" if self.engine.num_workers else self.verify)
        except MissingCheckpoint as error:
            raise MissingCheckpoint(f"ckpt_path={name!r}: {error} Or pass 'best', 'last' or 'auto'.") from error
        if self.engine.num_workers:
            return Choice(path)
        continues = self.call == "fit" and self.engine.ranks.decide(lambda: is_newest(checkpoint.path), CALL)
        return self._chosen(checkpoint, continues)

    def _best(self) -> str:
        for callback in self.callbacks:
            if callback.best_model_path:
                return callback.best_model_path
        if any(callback.last_model_path for callback in self.callbacks):
            raise CheckpointError(
                "ckpt_path='best': no best checkpoint, because the monitored metric had no finite value at any save (a run "
                "that ends within an epoch does not validate there). Pass 'last', or a path."
            )
        raise MissingCheckpoint(
            "ckpt_path='best': no checkpoint was saved by this trainer's ModelCheckpoint. Run fit first, or pass 'last' or the "
            "path of an existing one."
        )

    def _chosen(self, checkpoint: StoredCheckpoint, continues: bool) -> Choice:
        loggers = checkpoint.run_state().get("loggers", []) if self.call == "fit" else []
        return Choice(checkpoint.path, checkpoint, loggers, continues)

    def _newest(self, name: str) -> Choice:
        """Return the newest checkpoint. If it is damaged, "last" raises; "auto" warns and takes the next one. Collective."""
        is_fit, falls_back = self.call == "fit", name == "auto"
        where, found = self.engine.ranks.decide(self._candidates, CALL)
        for path, damage, is_refused in found:
            if is_refused:  # it is complete: an older one would lose what it contains
                raise CheckpointError(f"ckpt_path={name!r}: the newest checkpoint is {path}. {damage}")
            if not damage and self.engine.num_workers:
                return Choice(path)
            try:
                if damage:
                    raise CheckpointError(f"{path}: {damage}")
                chosen = self._chosen(self.engine.verified(path, self.verify), continues=is_fit)
                return replace(chosen, is_rerunnable=is_fit and falls_back)
            except CheckpointError as error:
                if not falls_back:
                    raise CheckpointError(
                        f"ckpt_path={name!r}: the newest checkpoint is damaged: replace it by a good copy, or remove it. "
                        f"{error} {FALL_BACK}"
                    ) from error
                text = f"ckpt_path='auto' skips {path}, which is damaged and is left untouched: {error}"
                rank_zero_warn(text, stacklevel=2)
        if falls_back and is_fit:
            self.say(f"ckpt_path='auto': no checkpoint found{where} that a fit can resume from; starting from scratch.")
            return Choice(is_rerunnable=True)
        problem = "no complete checkpoint found" if falls_back else "no checkpoint was saved"
        fix = "For a first start pass 'auto'" if is_fit else "Run fit first"
        raise MissingCheckpoint(f"ckpt_path={name!r}: {problem}{where}. {fix}, or pass a path.")

    def _candidates(self) -> tuple[str, list[tuple[str, str, bool]]]:
        """Return the searched folders in words, and their checkpoints as (path, damage, is_refused), newest first. Rank 0's."""
        folders: list[str] = []
        found: list[CheckpointEntry] = []
        for callback in self.callbacks:
            choices = self._default_folders() if callback.given_dirpath is None else [callback.given_dirpath]
            # A run that ended before its first save has left an empty folder, which hides no older one.
            filled = ((folder, entries) for folder in choices if (entries := self._entries_in(folder)))
            folder, entries = next(filled, (choices[0] if choices else None, []))
            if folder is not None and not any(same_path(folder, other) for other in folders):
                folders.append(folder)
                found += entries
        found.sort(key=lambda entry: entry.order)
        where = f" in {', '.join(folders)}" if folders else " yet"
        return where, [(entry.path, entry.damage, entry.is_refused) for entry in reversed(found)]

    def _entries_in(self, folder: str) -> list[CheckpointEntry]:
        return [entry for entry in find_candidates(folder) if self.call != "fit" or not entry.weights_only]

    def _default_folders(self) -> list[str]:
        """Return where a ModelCheckpoint without a dirpath may have saved, the newest run folder first."""
        for logger in self.loggers:
            if isinstance(logger, FolderLogger):
                return [f"{logger.log_dir_in(folder)}/{CHECKPOINTS}" for folder in logger.run_folders()]
            if logger.log_dir:
                return [f"{logger.log_dir}/{CHECKPOINTS}"]
        of_services = (_runs_of(logger, self.root) for logger in self.loggers if isinstance(logger, RemoteLogger))
        return [f"{folder}/{CHECKPOINTS}" for folder in next(of_services, [self.root])]


def _checked(ckpt_path: Any) -> str | None:
    """Return the text of ckpt_path, which may be None (TypeError, ValueError)."""
    if ckpt_path is not None and not isinstance(ckpt_path, (str, os.PathLike)):
        raise TypeError(f"ckpt_path={ckpt_path!r} is {a_type_of(ckpt_path)}. Pass a path, 'best', 'last' or 'auto'.")
    if ckpt_path == "":
        raise ValueError(
            "ckpt_path='' is an empty path. Pass a checkpoint's path, 'best', 'last' or 'auto', or None. (A best_model_path is "
            "empty as long as nothing was saved.)"
        )
    return None if ckpt_path is None else str(ckpt_path)


def _runs_of(logger: RemoteLogger, root: str) -> list[str]:
    """Return the folders of the runs that a service's logger may resume: its own, then those with the latest checkpoints."""
    own = [logger.run_folder(root)] if logger.version is not None else []
    if logger.given_id is not None:
        return own
    home = os.path.dirname(logger.run_folder(root))
    filesystem, inside = fsspec.core.url_to_fs(home)
    filesystem.invalidate_cache()
    saved: dict[str, Any] = {}  # the ids of a service's runs have no order, so the times of their files decide
    for path, entry in filesystem.find(inside, maxdepth=4, detail=True).items():
        moment = entry.get("LastModified", entry.get("mtime", entry.get("created")))
        folder = f"{home}/{path.removeprefix(f'{inside}/').partition('/')[0]}"
        saved[folder] = max(moment, saved.get(folder, moment))
    return [*own, *sorted(saved.keys() - set(own), key=saved.__getitem__, reverse=True)]
