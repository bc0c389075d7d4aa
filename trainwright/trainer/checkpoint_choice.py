"""Choice of a checkpoint: what ckpt_path stands for, whether it is whole, and which folder the run goes on in."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainwright.callbacks.checkpoint_files import SUFFIX
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint.filesystem import resolve
from trainwright.checkpoint.reader import Checkpoint, Verify, check_verify
from trainwright.checkpoint.store import CheckpointEntry, find_candidates, find_checkpoints, same_path
from trainwright.errors import CheckpointError
from trainwright.loggers import Logger
from trainwright.loggers.folder import FolderLogger
from trainwright.loggers.position import CHECKPOINTS
from trainwright.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer

NAMES = ("best", "last", "auto")

CALL = "the choice of a checkpoint"


@dataclass(frozen=True)
class Choice:
    """The checkpoint of a call.

    Args:
        path: its path; None for none. In a call that is handed over "auto" as it stands: the workers choose.
        checkpoint: the same, verified; None in a call that is handed over.
        loggers: where the loggers of its run stood, if this run goes on in that one's folder.
        continues: whether it is the newest of its folder, so that this run goes on with that one rather than branching off.
        is_rerunnable: whether the same call may come again, and is to find the end of the run.
        listed: for "last" and "auto" the names of checkpoints in the folders that they were chosen from.
    """

    path: str | None = None
    checkpoint: Checkpoint | None = None
    loggers: list[dict[str, Any]] = field(default_factory=list)
    continues: bool = False
    is_rerunnable: bool = False
    listed: dict[str, list[str]] = field(default_factory=dict)


def choose_checkpoint(trainer: Trainer, ckpt_path: str | os.PathLike[str] | None, verify: Verify, call: str) -> Choice:
    """Return the checkpoint that ckpt_path stands for, verified. Collective: call on every rank.

    A path is itself, "best" the best of the ModelCheckpoint. "last" and "auto" are the one of the highest step in the folders
    of all ModelCheckpoints; where the dirpath is the default one, that is in the newest run folder of the logger which has
    any. For a fit those with weights alone do not count. "last" is an error where that one is damaged; "auto" says so and
    takes the next lower one that is whole, and a fit begins anew where there is none.

    A fit from the newest checkpoint of a folder (damaged ones aside) goes on in the run folder of the loggers that it was
    saved with: their rows behind it are cut, and written again. A fit from an older one is a branch: its loggers begin a run
    folder of their own, and where theirs is fixed (a version was given, or the trainer has run before) they cut nothing.

    Raises:
        ValueError: a name without a ModelCheckpoint, or an unknown verify.
        CheckpointError: there is none, or it is damaged.
    """
    check_verify(verify)
    _check_path(ckpt_path)
    if ckpt_path is None:
        return Choice()
    name = str(ckpt_path)
    if name == "auto" and call == "fit" and trainer.fast_dev_run:
        return Choice()  # a trial run goes on with nothing
    if name in NAMES and not trainer.checkpoint_callbacks:
        raise ValueError(
            f"ckpt_path={name!r} asks for a checkpoint of a ModelCheckpoint, but this trainer has none; pass a path, or leave "
            "enable_checkpointing at True."
        )
    trainer.engine.finish_save()  # it may be the one
    is_remote = bool(trainer.engine.num_workers)
    if name == "auto":
        if is_remote:
            return Choice("auto")
        return replace(_newest_whole(trainer, verify, call), is_rerunnable=call == "fit")
    listed: dict[str, list[str]] = {}
    if name == "last":
        path, listed = trainer.engine.ranks.decide(lambda: _with_names(_newest(trainer, call).path), CALL)
    elif name == "best":
        path = trainer.engine.ranks.decide(lambda: _best(trainer), CALL)
    else:
        _refuse_misspelt(name)
        path = name
    if is_remote:
        return Choice(path)
    try:
        checkpoint = trainer.engine.verified(path, verify)
    except CheckpointError as error:
        if name != "last":
            raise
        raise CheckpointError(f"{error} {FALL_BACK}") from error
    continues = call == "fit" and (name == "last" or trainer.engine.ranks.decide(lambda: _is_newest(path), CALL))
    return replace(_chosen(checkpoint, continues), listed=listed)


def refuse_overtaken(trainer: Trainer, choice: Choice) -> None:
    """Refuse a choice that another run has overtaken before this one held the folder. Collective.

    Raises:
        CheckpointError: checkpoints have come or gone there meanwhile, on every rank alike.
    """

    def look() -> None:
        for folder, names in choice.listed.items():
            if _names(folder) != names:
                raise CheckpointError(
                    f"{choice.path or 'no checkpoint'} was chosen to go on from, and meanwhile another run has written to "
                    f"{folder}. It has ended: start this one again, and it goes on from what there is now."
                )

    if choice.listed:
        trainer.engine.ranks.decide(look, CALL)


def _with_names(path: str) -> tuple[str, dict[str, list[str]]]:
    """Return a checkpoint's path, and what lies beside it. Rank 0's."""
    folder = os.path.dirname(path.rstrip("/"))
    return path, {folder: _names(folder)}


def _names(folder: str) -> list[str]:
    """Return the names of what ModelCheckpoint may have written in a folder."""
    files, inside = resolve(folder)
    try:
        return sorted(name for name in files.listing(inside) if name.endswith(SUFFIX) and not name.startswith("."))
    except OSError:
        return []


FALL_BACK = "(ckpt_path='auto' falls back to the one before it.)"


def _chosen(checkpoint: Checkpoint, continues: bool) -> Choice:
    loggers = checkpoint.run_state().get("loggers", []) if continues else []
    return Choice(checkpoint.path, checkpoint, loggers, continues)


def _check_path(ckpt_path: Any) -> None:
    if ckpt_path is not None and not isinstance(ckpt_path, (str, os.PathLike)):
        raise TypeError(
            f"ckpt_path={ckpt_path!r} is a {type(ckpt_path).__name__}; accepted are a path, 'best', 'last' and 'auto'."
        )
    if ckpt_path is not None and not str(ckpt_path):
        raise ValueError(
            "ckpt_path='' is an empty path; pass a checkpoint's path, 'best', 'last' or 'auto', or None. (A best_model_path is "
            "empty as long as nothing was saved.)"
        )


def _refuse_misspelt(path: str) -> None:
    if path.lower() in NAMES and not os.path.lexists(path):
        raise ValueError(f"ckpt_path={path!r} is no path that exists. Did you mean {path.lower()!r}?")


def _best(trainer: Trainer) -> str:
    callback = trainer.checkpoint_callbacks[0]
    if not callback.best_model_path and callback.last_model_path:
        raise CheckpointError(
            "ckpt_path='best': the metric was never finite, so no checkpoint is the best; pass 'last', or a path."
        )
    if not callback.best_model_path:
        raise CheckpointError(
            "ckpt_path='best': no checkpoint was saved by this trainer's ModelCheckpoint. Run fit first, or pass 'last' or "
            "the path of one that is there."
        )
    return callback.best_model_path


def _newest(trainer: Trainer, call: str) -> CheckpointEntry:
    """Return the newest candidate, which is sound as far as its manifest goes. Rank 0's."""
    folders, found = _candidates(trainer, call)
    if not found:
        raise CheckpointError(
            f"ckpt_path='last': no checkpoint was saved{_places(folders)}. Run fit first, or pass a path."
        )
    newest = found[-1]
    if newest.damage:
        remedy = "" if newest.is_refused else f" It is damaged: put a good copy of it there, or remove it. {FALL_BACK}"
        raise CheckpointError(f"ckpt_path='last': the newest checkpoint is {newest.path}. {newest.damage}{remedy}")
    return newest


def _newest_whole(trainer: Trainer, verify: Verify, call: str) -> Choice:
    """Return the newest checkpoint that verifies, with a word on each damaged one. Collective."""

    def look() -> dict[str, Any]:
        folders, found = _candidates(trainer, call)
        weights = [] if found else _candidates(trainer, "test")[1]
        return {
            "places": _places(folders),
            "found": [_told(each) for each in reversed(found)],
            "weights": weights[-1].path if weights else "",
            "names": {folder: _names(folder) for folder in folders},
        }

    seen = trainer.engine.ranks.decide(look, CALL)
    for each in seen["found"]:
        damage = each["damage"]
        if each["is_refused"]:
            raise CheckpointError(f"ckpt_path='auto': the newest checkpoint is {each['path']}. {damage}")
        if not damage:
            try:
                chosen = _chosen(trainer.engine.verified(each["path"], verify), continues=call == "fit")
                listed = {
                    folder: names for folder, names in seen["names"].items() if each["path"].startswith(f"{folder}/")
                }
                return replace(chosen, listed=listed)
            except CheckpointError as error:
                damage = str(error)
        rank_zero_warn(
            f"ckpt_path='auto' passes over {each['path']}, which is damaged and stays where it is: {damage}",
            stacklevel=2,
        )
    if call != "fit":
        raise CheckpointError(
            f"ckpt_path='auto': there is no whole checkpoint{seen['places']}. Run fit first, or pass a path."
        )
    weights = f" ({seen['weights']} holds the weights alone, and no run goes on from those)" if seen["weights"] else ""
    trainer.print(
        f"ckpt_path='auto': there is no checkpoint to go on from{seen['places']}{weights}; the run begins anew."
    )
    given = [callback.given_dirpath for callback in trainer.checkpoint_callbacks]  # a default folder will be a new one
    return Choice(listed={folder: names for folder, names in seen["names"].items() if folder in given})


def _told(entry: CheckpointEntry) -> dict[str, Any]:
    return {"path": entry.path, "damage": entry.damage, "is_refused": entry.is_refused}


def _places(folders: list[str]) -> str:
    return f" in {', '.join(folders)}" if folders else " yet"


def _is_newest(path: str) -> bool:
    """Return whether no whole checkpoint beside this one is newer, those of weights alone aside. Rank 0's."""
    try:
        found = find_checkpoints(os.path.dirname(path.rstrip("/")) or ".")
    except CheckpointError:  # nobody may look there
        return False
    entries = [each for each in found if not each.weights_only]
    return bool(entries) and same_path(entries[-1].path, path)


def _candidates(trainer: Trainer, call: str) -> tuple[list[str], list[CheckpointEntry]]:
    """Return the folders that were looked into, and what lies there in ascending order."""
    folders: list[str] = []
    found: list[CheckpointEntry] = []
    for callback in trainer.checkpoint_callbacks:
        folder, entries = _folder_with_any(trainer, callback, call)
        if folder is not None and not any(same_path(folder, each) for each in folders):
            folders.append(folder)
            found += entries
    return folders, sorted(found, key=lambda entry: entry.order)


def _folder_with_any(
    trainer: Trainer, callback: ModelCheckpoint, call: str
) -> tuple[str | None, list[CheckpointEntry]]:
    """Return the newest folder of a ModelCheckpoint that holds a checkpoint, else the newest, and what lies in it."""
    places = _default_folders(trainer) if callback.given_dirpath is None else [callback.given_dirpath]
    for place in places:
        entries = [each for each in find_candidates(place) if call != "fit" or not each.weights_only]
        if entries:
            return place, entries
    return (places[0] if places else None), []


def _default_folders(trainer: Trainer) -> list[str]:
    """Return where a ModelCheckpoint without a dirpath may have saved, the newest run folder first."""
    for logger in trainer.loggers:
        folders = _log_dirs(logger)
        if folders is not None:
            return [f"{folder}/{CHECKPOINTS}" for folder in folders]
    return [f"{trainer.default_root_dir}/{CHECKPOINTS}"]


def _log_dirs(logger: Logger) -> list[str] | None:
    """Return what the logger's log_dir may be in this run; None where it has none."""
    if isinstance(logger, FolderLogger):
        return [logger.log_dir_in(folder) for folder in logger.run_folders()]
    return [logger.log_dir] if logger.log_dir else None
