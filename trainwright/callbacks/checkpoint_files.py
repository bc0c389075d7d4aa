"""The files of a ModelCheckpoint: which path a save gets, how it replaces others, and the link to the newest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from trainwright.callbacks.checkpoint_policy import Kept
from trainwright.checkpoint.discovery import is_checkpoint, is_replaceable, remove_older, replace_checkpoint, same_path
from trainwright.checkpoint.filesystem import resolve
from trainwright.checkpoint.last_link import is_last_link, point_to, remove_link
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.data.seeding import isolate_rng
from trainwright.errors import CheckpointError
from trainwright.faults.failing_loggers import outlived
from trainwright.loggers.base import KeptCheckpoints
from trainwright.loggers.files import CHECKPOINTS
from trainwright.loggers.remote import RemoteLogger
from trainwright.rank_zero import say, warn

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.checkpoint.store import BackgroundSave
    from trainwright.module import Module


def choose_paths(
    name: Callable[[int | None], str],
    exists: Callable[[str], bool],
    dropped: Sequence[str],
    kept: Iterable[str],
    source: str,
    *,
    replaces_any: bool,
) -> tuple[str, str]:
    """Return the path of a save, the first that is free or replaceable, and the free one that it is written to.

    `name` returns the path with a version. The save may replace the `dropped` checkpoints. If it `replaces_any`, it may also
    replace a whole checkpoint of the plain name that is not among the `kept`. It never replaces `source`, which the run was
    resumed from.
    """

    def is_replaced(path: str) -> bool:
        is_dropped = any(same_path(path, each) for each in dropped)
        may_go = is_dropped or (replaces_any and path == name(None))
        if not may_go or same_path(path, source):  # first, since the rest reads a manifest
            return False
        return (is_dropped or not any(same_path(path, each) for each in kept)) and is_replaceable(path)

    names = map(name, chain([None], count(1)))
    path = next(each for each in names if not exists(each) or is_replaced(each))
    return path, path if not exists(path) else next(each for each in names if not exists(each))


def default_folder(trainer: TrainerProtocol) -> str:
    """Return the folder of a run's checkpoints without a dirpath, once its loggers have theirs."""
    root = trainer.default_root_dir
    of_services = (each.run_folder(root) for each in trainer.loggers if isinstance(each, RemoteLogger))
    return f"{trainer.log_dir or next(of_services, root)}/{CHECKPOINTS}"


def is_taken(path: str) -> bool:
    """Return whether a checkpoint, whole or damaged, or anything else is at this path."""
    files, inside = resolve(path)
    return files.exists(inside) if files.has_rename else is_checkpoint(path)


def free_path(stem: str, extension: str) -> str:
    """Return the first free path with that stem, with a version where needed."""
    versions = (f"{stem}-v{number}{extension}" for number in count(1))
    return next(path for path in chain([f"{stem}{extension}"], versions) if not is_taken(path))


def free_link(name: Callable[[int | None], str], saved: Sequence[str]) -> str:
    """Return the first path of those `name` returns that is free, or is a link to a checkpoint, which is replaced.

    The paths being `saved` are not free.
    """
    paths = (path for path in map(name, chain([None], count(1))) if path not in saved)
    return next(path for path in paths if is_last_link(path) or not is_taken(path))


def save_failed_run(
    asker: str,
    trainer: TrainerProtocol,
    stem: str,
    extension: str,
    weights_only: bool = False,
    *,
    replaces: bool = False,
    trained_only: bool = False,
) -> str:
    """Save a run that an exception ends, if it can be resumed exactly. Return the path, or "" if nothing was saved.

    The rank that fails first saves without the others, which wait in the batch. The printed text begins with `asker`.
    `replaces` allows replacing a checkpoint at the plain path.
    """
    ranks = trainer.engine.ranks
    try:
        refusal = trainer.state.progress.obstacle
        if not refusal and not trainer.engine.connection.sync_point(f"{asker}'s save").claim():
            refusal = "another rank saves the run"
        with ranks.alone(), isolate_rng():
            if not refusal and not (refusal := trainer.engine.find_fault()):
                path = f"{stem}{extension}"
                overwrite = replaces and is_replaceable(path)
                path = path if overwrite else free_path(stem, extension)
                trainer.save_checkpoint(path, weights_only, overwrite=overwrite, trained_only=trained_only)
                batch = (
                    f", as before batch {trainer.state.batch}, which a resumed run trains again. From that batch remain: the "
                    "RNG state, the logged values and changes of buffers"
                )
                rank = f" It has the RNG state and the epoch's logged values of rank {trainer.global_rank} only."
                where = f"{path}{batch if trainer.state.progress.is_in_batch else ''}.{rank if trainer.world_size > 1 else ''}"
                say(f"{asker}: the run was saved as {where}")
                return path
        others = (getattr(callback, "last_model_path", "") for callback in trainer.callbacks)
        last = next(filter(None, others), trainer.resume_source)
        rest = f"the last complete checkpoint is {last}" if last else "no earlier checkpoint exists"
        say(f"{asker}: nothing is saved: {refusal}; {rest}.")
    except Exception as error:  # the user has to see the first exception, not this one
        say(f"{asker}: the save failed: {type(error).__name__}: {error}")
    return ""


def path_of_stop(trainer: TrainerProtocol, kept: Kept, own: str, extension: str) -> tuple[str, bool]:
    """Return where a run that ends here is saved, and whether a checkpoint of this very position is there already."""
    for path in (kept["last"], trainer.resume_source or ""):
        if path and _holds_position(path, trainer):
            return path, True
    # Shorter than the names of epoch ends, so that at the same step those count as newer.
    return free_path(f"{own}-step={trainer.global_step}", extension), False


def _holds_position(path: str, trainer: TrainerProtocol) -> bool:
    try:
        saved: dict[str, Any] | None = open_checkpoint(path, "off").run_state().get("position")
    except CheckpointError:
        return False
    return saved is not None and trainer.state.is_where(saved)  # None: it holds weights only


def remove_replaced(paths: Sequence[str], committed: str, trainer: TrainerProtocol) -> list[str]:
    """Remove, on rank 0, the checkpoints that a committed one replaces. Return the paths that have to stay for now.

    The resume source stays. A later run, resumed from another one, removes it. Symbolic links and anything that is not a
    complete checkpoint stay, and nothing is removed unless the committed one is complete.
    """
    kept = [each for each in paths if same_path(each, trainer.resume_source or "")]
    if trainer.is_global_zero:
        remove_older([each for each in paths if each not in kept], committed)
    return kept


def link_newest(links: tuple[str, str], path: str, trainer: TrainerProtocol) -> None:
    """Point the link, if any, to the newest checkpoint, on rank 0. Remove a link of another name."""
    link, before = links
    if not link or not trainer.is_global_zero:
        return
    try:
        point_to(link, path)
        if before and before != link:
            remove_link(before)
    except OSError as error:  # the checkpoint itself is complete
        warn(f"{link} could not be made to lead to {path}: {error}.", stacklevel=2)


def announce(kept: KeptCheckpoints, trainer: TrainerProtocol, module: Module) -> None:
    """Tell the callbacks, on every rank, and the loggers, on rank 0, that the newest checkpoint is complete."""
    for callback in sorted(trainer.callbacks, key=attrgetter("priority"), reverse=True):
        callback.on_checkpoint_saved(trainer, module, kept.last_model_path)
    for logger in trainer.loggers if trainer.is_global_zero else ():
        outlived(logger, "after_save_checkpoint", kept)


def loaded(state: Mapping[str, Any], folder: str, *, ranks_others: bool) -> Kept:
    """Return the kept checkpoints of a saved state that still exist in this folder, or with `ranks_others` the best in any."""

    def is_ours(path: str) -> bool:
        return same_path(path.rpartition("/")[0], folder) and is_checkpoint(path)

    may_rank = is_checkpoint if ranks_others else is_ours
    last = state["last_model_path"]
    home, _, name = state.get("link", "").rpartition("/")
    return {
        "scores": {path: float(score) for path, score in state["best_k_models"].items() if may_rank(path)},
        "last": last if is_ours(last) else "",
        "written_to": state.get("place", ""),
        "replaced": [path for path in state.get("replaced", []) if is_ours(path)],
        "current_score": state.get("current_score"),
        # That of another folder belongs to the run there. In this one's spelling, since a new link replaces another.
        "link": f"{folder}/{name}" if same_path(home, folder) else "",
    }


def moved(state: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return a saved state with the paths in the folder to which its checkpoints were moved or copied."""
    home = state["last_model_path"].rpartition("/")[0]
    if same_path(home, folder):
        return dict(state)

    def here(path: Any) -> Any:
        if not isinstance(path, str) or path.rpartition("/")[0] != home:
            return path
        moved_to = f"{folder}/{path.rpartition('/')[2]}"
        return moved_to if _was_saved_as(moved_to, path) else path

    paths = {name: here(value) for name, value in state.items()}
    for name in ("best_k_models", "steps"):
        paths[name] = {here(path): value for path, value in state.get(name, {}).items()}
    return {**paths, "replaced": [here(path) for path in state.get("replaced", [])]}


def _was_saved_as(path: str, before: str) -> bool:
    """Return whether a checkpoint here says that a ModelCheckpoint saved it as `before`. Weights only say nothing."""
    try:
        states = open_checkpoint(path, "off").run_state().get("callbacks", {}).values()
    except CheckpointError:
        return False
    return not states or any(before in map(state.get, ("last_model_path", "place", "link")) for state in states)


def kept_again(
    kept: Kept, unrenamed: tuple[str, str, float | None], steps: Mapping[str, int], trainer: TrainerProtocol
) -> Kept:
    """Return the kept checkpoints of a resumed run, as rank 0 finds them, without the replaced ones. Collective."""
    source = trainer.resume_source
    if source is None:
        return kept
    find = partial(found_again, kept, unrenamed, steps, source)
    scores, last, replaced = trainer.engine.ranks.decide(find, "the start of ModelCheckpoint")
    # A killed run may not have removed it.
    return {**kept, "scores": scores, "last": last, "replaced": remove_replaced(replaced, source, trainer)}


def found_again(
    kept: Kept, unrenamed: tuple[str, str, float | None], steps: Mapping[str, int], source: str
) -> tuple[dict[str, float], str, list[str]]:
    """Return the scores of the kept checkpoints, the newest, and the paths that it replaces, as found at a resume.

    A path may contain a different save: the intended one was not renamed yet, or a later save of the killed run
    has taken the path. Such a path is not among the kept ones. The next save may use it. `unrenamed` is where the newest
    was written, its final path, and its score. `steps` has the optimizer step of every checkpoint, as far as known.
    """
    found, last, replaced = dict(kept["scores"]), kept["last"], list(kept["replaced"])
    written_to, path, score = unrenamed
    if written_to and (same_path(written_to, source) or (path in steps and _step_of(written_to) == steps[path])):
        found.pop(path, None)
        if score is not None:
            found[written_to] = score
        last = written_to
        replaced.append(path)
    own = {each: of for each, of in found.items() if each not in steps or _step_of(each) == steps[each]}
    return own, last, replaced


def _step_of(path: str) -> int | None:
    try:
        return open_checkpoint(path, "off").step
    except CheckpointError:
        return None  # no checkpoint is there


@dataclass
class PendingSave:
    """A save that was begun and has not been concluded."""

    path: str
    written_to: str
    """Another path than `path` if the save replaces the checkpoint there."""
    dropped: list[str]
    links: tuple[str, str]
    """The link that leads to the newest checkpoint, and the one before, or "" for none."""
    save: BackgroundSave | None
    """The save in its thread, or None if it was made within the call."""
    put_back: Callable[[], None]
    """Restores the kept checkpoints from before this save."""
    keep: Callable[[list[str]], None]
    """Called with the paths among `dropped` that have to stay for now."""
    report: str
    """Printed once it has committed, unless empty."""
    is_linked: bool = False
    """Whether the link leads to it."""

    @property
    def is_committed(self) -> bool:
        return self.save is None or self.save.is_committed

    @property
    def waits(self) -> bool:
        """Return whether it has committed, and a link or replaced checkpoints still have to follow."""
        return self.is_committed and bool(self.dropped or (self.links[0] and not self.is_linked))

    def conclude(self, trainer: TrainerProtocol) -> None:
        """Wait for the commit, rename the checkpoint to its path and remove those it replaces. Collective.

        Raises:
            CheckpointError: the save failed, on every rank. The kept checkpoints are as before.
        """
        try:
            trainer.engine.finish_save()
            if self.is_committed and self.written_to != self.path:
                # As a decision, so that no rank looks for the path before rank 0 has renamed it.
                rename = partial(replace_checkpoint, self.written_to, self.path)
                trainer.engine.ranks.decide(rename, "a save of ModelCheckpoint")
                self.written_to = self.path
        except BaseException:
            self.put_back()
            raise
        if not self.is_committed:  # the caller of the next save got the error
            self.put_back()
            return
        if self.report:
            trainer.print(self.report)
        self.remove_dropped(trainer)

    def conclude_alone(self, trainer: TrainerProtocol) -> None:
        """Do the same after an error has ended the run, without waiting or communicating."""
        if not self.is_committed:
            self.put_back()
            return
        if self.written_to != self.path:
            if trainer.is_global_zero:
                replace_checkpoint(self.written_to, self.path)
            self.written_to = self.path
        self.remove_dropped(trainer)

    def remove_dropped(self, trainer: TrainerProtocol) -> None:
        """Remove the replaced checkpoints, once and on rank 0. The resume source stays."""
        # First, so that the link never leads to a checkpoint that is removed below.
        link_newest(self.links, self.written_to, trainer)
        self.is_linked = True
        if self.dropped:  # otherwise a second call would drop paths that have to stay
            dropped, self.dropped = self.dropped, []
            self.keep(remove_replaced(dropped, self.written_to, trainer))
