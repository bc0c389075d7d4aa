"""Choice of a checkpoint: what ckpt_path means, whether that is complete, and which run folder the fit continues in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import fsspec

from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint.discovery import CheckpointEntry, find_candidates, is_newest, same_path
from trainwright.checkpoint.filesystem import resolve
from trainwright.checkpoint.lock import FolderLock, lock_folder
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
    listed: dict[str, list[str]] = field(default_factory=dict)
    """For "last" and "auto": by searched folder, the names of its checkpoints."""
    extensions: tuple[str, ...] = ()
    """How these names may end."""

    def refuse_overtaken(self, ranks: Ranks) -> None:
        """Refuse the choice if another run changed the folders before this one locked them. Collective.

        Raises:
            CheckpointError: on every rank.
        """

        def look() -> None:
            for folder, names in self.listed.items():
                if _names(folder, self.extensions) != names:
                    raise CheckpointError(
                        f"Another run wrote to {folder} after {self.path or 'no checkpoint'} had been selected, and has "
                        "finished since. Start this command again to resume from the newest checkpoint."
                    )

        if self.listed:
            ranks.decide(look, CALL)


class FolderLocks:
    """The locks of one fit; rank 0's process holds them."""

    def __init__(self, ranks: Ranks, say: Callable[[str], None]) -> None:
        self._ranks, self._say = ranks, say
        self._locks: dict[str, FolderLock] = {}

    def take(self, folders: Iterable[str | None]) -> None:
        """Lock the known folders (not None) that this process has not locked yet. Collective.

        Raises:
            CheckpointError: on every rank, if another run holds one.
        """
        wanted = [folder for folder in dict.fromkeys(folders) if folder is not None and folder not in self._locks]
        if not wanted:
            return

        def take() -> list[str]:
            for folder in wanted:
                self._locks[folder] = lock_folder(folder)
            return [self._locks[folder].previous_holder for folder in wanted]

        holders = self._ranks.decide(take, "the locks of the checkpoints' folders")
        for folder, earlier in zip(wanted, holders, strict=True):
            self._locks.setdefault(folder, FolderLock(folder, None))  # rank 0's, as the other ranks know it
            if earlier:
                self._say(f"{folder} was held by {earlier}, which has ended; this run takes it over.")

    def release(self) -> None:
        while self._locks:  # a lock leaves the dict first, so that an error here does not release it twice
            self._locks.popitem()[1].release()


@dataclass(frozen=True)
class CheckpointSearch:
    """Finds the checkpoint of one call.

    A path is itself, "best" the best of the first ModelCheckpoint that has one. "last" and "auto" are the one of the highest
    step in the folders of all ModelCheckpoints; the default folder is in the newest run folder of the logger that has any
    checkpoint. A fit ignores checkpoints with weights only. If that checkpoint is damaged, "last" is an error, while "auto"
    warns and takes the next lower one that is complete; a fit without any starts from scratch.

    A fit from the newest checkpoint of a folder (damaged ones aside) continues in the run folder of the loggers that it was
    saved with, whose later rows are cut and written again. A fit from an older one is a branch: its loggers begin a run
    folder of their own; if theirs is fixed (a version was given, or the trainer has run before) they cut nothing.
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
        _check_path(ckpt_path)
        name = None if ckpt_path is None else str(ckpt_path)
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
        if self.engine.num_workers:
            self.engine.verified(path, "off")  # a missing checkpoint is the caller's error, not the workers'
            return Choice(path)
        checkpoint = self.engine.verified(path, self.verify)
        continues = self.call == "fit" and self.engine.ranks.decide(lambda: is_newest(checkpoint.path), CALL)
        return _chosen(checkpoint, continues, self.call)

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

    def _newest(self, name: str) -> Choice:
        """Return the newest checkpoint. If it is damaged, "last" raises; "auto" warns and takes the next one. Collective."""
        is_fit, falls_back = self.call == "fit", name == "auto"
        extensions = tuple({callback.FILE_EXTENSION for callback in self.callbacks})

        def look() -> dict[str, Any]:
            folders, found = self._candidates(not is_fit)
            weights = [] if found else self._candidates(True)[1]
            return {
                "where": f" in {', '.join(folders)}" if folders else " yet",
                "found": [asdict(each) for each in reversed(found)],  # plain data, which can go to the other ranks
                "weights": weights[-1].path if weights else "",
                # Compared again once the folders are locked: until then another run may save there.
                "names": {folder: _names(folder, extensions) for folder in folders},
            }

        seen = self.engine.ranks.decide(look, CALL)
        names: dict[str, list[str]] = seen["names"]
        for entry in (CheckpointEntry(**each) for each in seen["found"]):
            path, damage = entry.path, entry.damage
            newest = f"ckpt_path={name!r}: the newest checkpoint is {path}. {damage}"
            if entry.is_refused:  # it is complete: an older one would lose what it holds
                raise CheckpointError(newest)
            if damage and not falls_back:
                raise CheckpointError(f"{newest} It is damaged: replace it by a good copy, or remove it. {FALL_BACK}")
            if not damage and self.engine.num_workers:
                return Choice(path)
            if not damage:
                try:
                    chosen = _chosen(self.engine.verified(path, self.verify), is_fit, self.call)
                except CheckpointError as error:
                    if not falls_back:
                        raise CheckpointError(f"{error} {FALL_BACK}") from error
                    damage = str(error)
                else:
                    listed = {folder: inside for folder, inside in names.items() if path.startswith(f"{folder}/")}
                    return replace(chosen, listed=listed, extensions=extensions, is_rerunnable=is_fit and falls_back)
            rank_zero_warn(
                f"ckpt_path='auto' skips {path}, which is damaged and is left untouched: {damage}", stacklevel=2
            )
        if not falls_back or not is_fit:
            problem = "no complete checkpoint found" if falls_back else "no checkpoint was saved"
            fix = "For a first start pass 'auto'" if is_fit else "Run fit first"
            raise MissingCheckpoint(f"ckpt_path={name!r}: {problem}{seen['where']}. {fix}, or pass a path.")
        weights = f" ({seen['weights']} holds only weights, from which no run can resume)" if seen["weights"] else ""
        self.say(f"ckpt_path='auto': no checkpoint found{seen['where']}{weights}; starting from scratch.")
        # A default folder is left out, because this run gets a new one.
        given = [callback.given_dirpath for callback in self.callbacks]
        listed = {folder: names[folder] for folder in names if folder in given}
        return Choice(listed=listed, extensions=extensions, is_rerunnable=True)

    def _candidates(self, takes_weights: bool) -> tuple[list[str], list[CheckpointEntry]]:
        """Return the searched folders, and what they hold in ascending order. Rank 0's."""
        folders: list[str] = []
        found: list[CheckpointEntry] = []
        for callback in self.callbacks:
            choices = self._default_folders() if callback.given_dirpath is None else [callback.given_dirpath]
            folder, entries = _first_filled(choices, takes_weights)
            if folder is not None and not any(same_path(folder, each) for each in folders):
                folders.append(folder)
                found += entries
        return folders, sorted(found, key=lambda entry: entry.order)

    def _default_folders(self) -> list[str]:
        """Return where a ModelCheckpoint without a dirpath may have saved, the newest run folder first."""
        for logger in self.loggers:
            if isinstance(logger, FolderLogger):
                return [f"{logger.log_dir_in(folder)}/{CHECKPOINTS}" for folder in logger.run_folders()]
            if logger.log_dir:
                return [f"{logger.log_dir}/{CHECKPOINTS}"]
        of_services = (_runs_of(each, self.root) for each in self.loggers if isinstance(each, RemoteLogger))
        return [f"{folder}/{CHECKPOINTS}" for folder in next(of_services, [self.root])]


def _check_path(ckpt_path: Any) -> None:
    if ckpt_path is None:
        return
    if not isinstance(ckpt_path, (str, os.PathLike)):
        raise TypeError(
            f"ckpt_path={ckpt_path!r} is {a_type_of(ckpt_path)}. Expected a path, 'best', 'last' or 'auto'."
        )
    path = str(ckpt_path)
    if not path:
        raise ValueError(
            "ckpt_path='' is an empty path. Pass a checkpoint's path, 'best', 'last' or 'auto', or None. (A best_model_path is "
            "empty as long as nothing was saved.)"
        )
    if path not in NAMES and path.lower() in NAMES and not os.path.lexists(path):
        raise ValueError(f"ckpt_path={path!r} does not exist. Did you mean {path.lower()!r}?")


def _chosen(checkpoint: StoredCheckpoint, continues: bool, call: str) -> Choice:
    loggers = checkpoint.run_state().get("loggers", []) if call == "fit" else []
    return Choice(checkpoint.path, checkpoint, loggers, continues)


def _names(folder: str, extensions: tuple[str, ...]) -> list[str]:
    """Return the names in a folder that ModelCheckpoint may have written."""
    files, inside = resolve(folder)
    try:
        return sorted(name for name in files.listing(inside) if name.endswith(extensions) and not name.startswith("."))
    except OSError:
        return []


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


def _first_filled(folders: list[str], takes_weights: bool) -> tuple[str | None, list[CheckpointEntry]]:
    """Return the first folder that holds a checkpoint, else the first of all, and what it holds."""
    # A run that ended before its first save has left an empty folder, which hides no older one.
    for folder in folders:
        if entries := [each for each in find_candidates(folder) if takes_weights or not each.weights_only]:
            return folder, entries
    return (folders[0] if folders else None), []
