"""The files of a ModelCheckpoint: how checkpoints are named, which path a save gets, and how it replaces others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from trainwright.callbacks.checkpoint_policy import Kept
from trainwright.checkpoint.discovery import (
    is_checkpoint,
    is_replaceable,
    remove_older,
    replace_checkpoint,
    same_path,
)
from trainwright.checkpoint.filesystem import resolve
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.errors import CheckpointError

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.checkpoint.store import BackgroundSave

SUFFIX = ".ckpt"
FIELD = r"\{([^{}:]+)(:[^{}]*)?\}"
"""A field of a template: a name and, if wanted, its format."""


def check_template(template: str) -> None:
    """Raise ValueError for an unpaired brace."""
    if set("{}") & set(re.sub(FIELD, "", template)):
        raise ValueError(
            f"filename={template!r} has a brace without its pair; write fields as {{epoch}} or {{val_loss:.3f}}."
        )


def fill_template(template: str, values: Mapping[str, Any], *, insert_names: bool) -> str:
    """Return the name, with "epoch=3" for {epoch} rather than "3" if `insert_names`; ValueError if a metric was not logged."""

    def written(match: re.Match[str]) -> str:
        name, spec = match.group(1), match.group(2) or ""
        if name not in values:
            raise ValueError(
                f"filename={template!r} asks for {name!r}, which was not logged; there are {', '.join(sorted(values))}."
            )
        text = format(values[name], spec[1:])
        return f"{name.replace('/', '_')}={text}" if insert_names else text  # "/" would make a folder

    return re.sub(FIELD, written, template)


def name_values(trainer: TrainerProtocol, monitor: str | None, template: str, is_left: bool) -> dict[str, Any]:
    """Return the values of a template's fields at this point of the run.

    With a monitor, a metric of earlier weights is NaN. Until the monitor is logged, or if the run stops within the epoch, so is
    every field that is missing.
    """
    values: dict[str, Any] = {
        name: math.nan if monitor is not None and trainer.metrics.is_outdated(name) else float(value)
        for name, value in trainer.callback_metrics.items()
    }
    values.update(epoch=trainer.current_epoch, step=trainer.global_step)
    if is_left or (monitor is not None and monitor not in values):
        values = {**{name: math.nan for name, _ in re.findall(FIELD, template)}, **values}
    return values


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

    `name` returns the path with a version. The save may replace the `dropped` checkpoints and, if it `replaces_any`, a whole
    one that has the plain name and is not among the `kept`; never `source`, which the run was resumed from.
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


def is_taken(path: str) -> bool:
    """Return whether a checkpoint, whole or damaged, or anything else is at this path."""
    files, inside = resolve(path)
    return files.exists(inside) if files.has_rename else is_checkpoint(path)


def free_path(stem: str) -> str:
    """Return the first free path with that stem, with a version where needed."""
    versions = (f"{stem}-v{number}{SUFFIX}" for number in count(1))
    return next(path for path in chain([f"{stem}{SUFFIX}"], versions) if not is_taken(path))


def path_of_stop(trainer: TrainerProtocol, kept: Kept, own: str) -> tuple[str, bool]:
    """Return where a run that ends here is saved, and whether a checkpoint of this very position is there already."""
    for path in (kept["last"], trainer.resume_source or ""):
        if path and _holds_position(path, trainer):
            return path, True
    # Shorter than the names of epoch ends, so that at the same step those count as newer.
    return free_path(f"{own}-step={trainer.global_step}"), False


def _holds_position(path: str, trainer: TrainerProtocol) -> bool:
    try:
        saved: dict[str, Any] | None = open_checkpoint(path, "off").run_state().get("position")
    except CheckpointError:
        return False
    return saved is not None and trainer.state.is_where(saved)  # None: it holds weights only


def remove_replaced(paths: Sequence[str], committed: str, trainer: TrainerProtocol) -> list[str]:
    """Remove, on rank 0, the checkpoints that a committed one replaces; return those that have to stay for now.

    The resume source stays; a later run, resumed from another one, removes it. Symbolic links and anything that is not a
    whole checkpoint are left alone, and nothing is removed unless the committed one is whole.
    """
    kept = [each for each in paths if same_path(each, trainer.resume_source or "")]
    if trainer.is_global_zero:
        remove_older([each for each in paths if each not in kept], committed)
    return kept


def loaded(state: Mapping[str, Any], folder: str) -> Kept:
    """Return what a saved state keeps, as far as it still exists in this folder."""

    def is_ours(path: str) -> bool:
        return same_path(path.rpartition("/")[0], folder) and is_checkpoint(path)

    last = state["last_model_path"]
    return {
        "scores": {path: float(score) for path, score in state["best_k_models"].items() if is_ours(path)},
        "last": last if is_ours(last) else "",
        "written_to": state.get("place", ""),
        "replaced": [path for path in state.get("replaced", []) if is_ours(path)],
        "current_score": state.get("current_score"),
    }


def found_again(
    kept: Kept, unrenamed: tuple[str, str, float | None], steps: Mapping[str, int], source: str
) -> tuple[dict[str, float], str, list[str]]:
    """Return the scores of the kept checkpoints, the newest, and what it replaces, as found where a run resumes.

    A path may hold another save than the one that was meant: its own was not renamed yet, or a later save of the killed run
    has taken the path. Such a path is not among the kept ones, and the next save may use it. `unrenamed` is where the newest
    was written, its final path, and its score, and `steps` has the optimizer step of each checkpoint, as far as known.
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
    save: BackgroundSave | None
    """The save in its thread; None if it was made within the call."""
    put_back: Callable[[], None]
    """Restores what was kept before this save."""
    keep: Callable[[list[str]], None]
    """Called with those of `dropped` that have to stay for now."""
    report: str
    """Printed once it has committed, unless empty."""

    @property
    def is_committed(self) -> bool:
        return self.save is None or self.save.is_committed

    def conclude(self, trainer: TrainerProtocol) -> None:
        """Wait for the commit, rename the checkpoint to its path and remove those it replaces. Collective.

        Raises:
            CheckpointError: the save failed, on every rank; the kept checkpoints are those of before.
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
        """Remove the replaced checkpoints, once and on rank 0; the resume source stays."""
        dropped, self.dropped = self.dropped, []
        self.keep(remove_replaced(dropped, self.written_to, trainer))
